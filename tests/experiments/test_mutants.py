"""Slips of a hand in a policy's source, and what the kit makes of them."""

import ast
import json
from pathlib import Path

import pytest

import policies
from experiments.__main__ import main
from experiments.mutants import command, survey, tables
from experiments.mutants.operators import Mutant, mutants
from experiments.mutants.survey import DEAD, FOUND, LAWFUL, WITHOUT, _examined, _judged, drawn

SOURCE = '''
"""A module."""

LIMIT = 3


class Part:
    """A part."""

    size: int = 5

    def __post_init__(self):
        if self.size < 1:
            raise ValueError("size")

    def __call__(self, rows):
        """Whether there are few."""
        if rows < self.size and not self.full:
            self.seen += 1
            self.rows.append(rows)
        return min(rows, -rows)
'''


def changes(source):
    return {(one.kind, one.before, one.after) for one in mutants("part", source)}


def test_every_slip_there_is_by_hand():
    test = "rows < self.size and (not self.full)"
    assert changes(SOURCE) == {
        ("always", _if(test), _if("True")),
        ("and/or", test, "rows < self.size or not self.full"),
        ("comparison", "rows < self.size", "rows <= self.size"),
        ("sign dropped", "not self.full", "self.full"),
        ("left out", "self.seen += 1", "pass"),
        ("number + 1", "1", "2"),
        ("left out", "self.rows.append(rows)", "pass"),
        ("other function", "min(rows, -rows)", "max(rows, -rows)"),
        ("sign dropped", "-rows", "rows"),
    }


def _if(test):
    return f"if {test}: self.seen += 1 self.rows.append(rows)"


def test_a_mutant_is_the_module_but_for_one_place():
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for one in mutants("part", SOURCE):
        changed = one.of(SOURCE)
        lines = changed.splitlines()
        assert ast.unparse(ast.parse(changed)) == changed
        if one.kind != "always":
            differ = [(old, new) for old, new in zip(plain, lines, strict=True) if old != new]
            assert len(differ) == 1
        assert one.owner == "Part"
        assert one.line == 1 + next(
            number
            for number, line in enumerate(SOURCE.splitlines())
            if one.before.partition(":")[0].partition(" and ")[0] in line and number > 15
        )


def test_equal_seeds_draw_equal_mutants_of_all_modules():
    some = drawn("policies", 60, 3)
    assert some == drawn("policies", 60, 3) != drawn("policies", 60, 4)
    with_slips = {one.module for one in drawn("policies", 10_000, 3)}
    assert len(with_slips) > 20 and {one.module for one in some} == with_slips
    assert {one.module for one in drawn("core", 30, 0)} == set(survey.CORE)


def test_options_know_every_part_that_ships():
    known = survey.options(Path(policies.__file__).parents[1] / "conf" / "policy")
    assert known["policies.order.Sjf"][-2:] == ["policy/order=sjf", "policy.order.ageing=20.0"]
    assert "policy.budget.tokens=16" in known["policies.budget.ChunkedPrefill"]
    assert all(target.startswith("policies.") for target in known)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ({"failed": {"stall": "x", "starvation": "y"}, "digest": "a", "refused": []}, FOUND),
        ({"failed": {"starvation": "z"}, "digest": "b", "refused": []}, LAWFUL),
        ({"failed": {"starvation": "y"}, "digest": "a", "refused": []}, WITHOUT),
        ({"failed": {}, "digest": "a", "refused": ["lockstep"]}, LAWFUL),
        ({"dead": "TypeError: no"}, DEAD),
        ({"hangs": True}, survey.HANGS),
    ],
)
def test_what_the_original_fails_too_is_no_finding(answer, verdict):
    judged = _judged(answer, {"failed": {"starvation": "y"}, "digest": "a", "refused": []})
    assert judged["verdict"] == verdict
    assert set(judged["failed"]) == ({"stall"} if verdict == FOUND else {"made"} if verdict == DEAD else set())


def test_a_slip_is_examined_in_a_process_of_its_own():
    """First come, first served forgets who is served: nobody ever is. The file on the disk stays as it was."""
    file = Path(policies.__file__).parent / "order.py"
    before = file.read_text()
    (slip,) = [
        one
        for one in mutants("policies.order", before)
        if one.owner == "Fcfs" and one.kind == "comparison" and one.before == "head is not served"
    ]
    words = [*survey.PLAIN[""], "policy/order=fcfs"]
    answer = _examined(slip.module, slip.of(before), words, 1, 0)
    assert "stall" in answer["failed"] and answer["digest"]
    assert file.read_text() == before
    broken = _examined(slip.module, "raise RuntimeError('no')", words, 1, 0)
    assert broken == {"dead": broken["dead"]} and "no" in broken["dead"]


def test_the_command_keeps_a_record_and_tells_what_the_kit_did_not(tmp_path, monkeypatch, capsys):
    picked = [Mutant("policies.order", line, "Fcfs", "left out", "x += 1", "pass") for line in (1, 2)]
    answers = {"": {"failed": {}, "digest": "a", "refused": []}}
    monkeypatch.setattr(command, "drawn", lambda of, count, seed: picked[:count])
    monkeypatch.setattr(Mutant, "of", lambda self, source: "changed")
    monkeypatch.setattr(survey, "_examined", lambda *given: answers[""] | {"digest": given[0] or "a"})
    assert main(["mutants", "--count", "2", "--workers", "1", "-o", str(tmp_path / "out" / "m.json")]) == 0
    told = capsys.readouterr().out
    assert "   2  lawful" in told and "lawful: policies.order:1 Fcfs: x += 1  =>  pass" in told
    record = json.loads((tmp_path / "out" / "m.json").read_text())
    assert [one["line"] for one in record["mutants"]] == [1, 2]
    assert record["of"] == "policies" and record["seed"] == 0 and "revision" in record


def test_tables_count_and_group_by_hand():
    def result(verdict, owner, **more):
        about = {"module": "policies.x", "line": 1, "owner": owner, "before": f"{owner} | 1", "after": "2"}
        return about | {"verdict": verdict, "failed": {}} | more

    found = [result(FOUND, "A", failed={"stall": "x", "pace": "y"}), result(FOUND, "B", failed={"stall": "x"})]
    lawful = [result(LAWFUL, "C", why="another order"), result(WITHOUT, "D")]
    record = {"surveys": [{"of": "policies", "mutants": [*found, *lawful]}, {"of": "core", "mutants": found[:1]}]}
    counted = tables.MUTANTS["mutants"](record).splitlines()
    assert counted[0] == "|  | policies | core |"
    assert [line.split(" | ")[1:] for line in counted[2:5]] == [["2", "1 |"], ["1", "0 |"], ["1", "0 |"]]
    assert tables.MUTANTS["mutants_found"](record).splitlines()[2:] == ["| `stall` | A: `A \\| 1` to `2` | 3 |"]
    assert tables.MUTANTS["mutants_missed"](record).splitlines()[2:] == [
        "| another order | C: `C \\| 1` to `2` | 1 |",
    ]


def test_a_helper_is_examined_in_a_policy_that_uses_it():
    known = survey.options(Path(policies.__file__).parents[1] / "conf" / "policy")

    def words(module, owner):
        return survey.chosen(Mutant(f"policies.{module}", 1, owner, "left out", "x", "pass"), known)

    assert "policy/victims=cost_aware" in words("victims", "Cheaper")
    assert "policy/admission=decode_reserve" in words("reserve", "reserved_blocks")
    assert "policy/overlap=prefill_decode" in words("overlap", "PrefillDecode")
    assert "policy.route.own=true" in words("dispatched", "Turns")
    assert words("rank", "Rank") is None
    assert words("composed", "Composed") == survey.PLAIN[""]
