"""The kit finds every disease that it is meant to find, in a small case, and nothing in what is well."""

import signal

import pytest

from playground.check import alarm
from playground.check.adversaries import FAMILIES, cases
from playground.check.case import Case, Saved, load, save
from playground.check.decisions import Cost, cost
from playground.check.examination import examine, replayed
from playground.check.laws import Broken
from playground.check.properties import PROPERTIES, Limits, named
from playground.check.serving import attend
from playground.check.shrinking import shrink
from playground.core import Request, Spec
from playground.scheduler import Scheduler
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.order import Sjf
from policies.predictors import OracleLength
from tests.playground.check.sick import HEALTHY, SICK, Circles, ComparesAll, healthy

SMALL = 2_000
"""Tokens for looking for smaller cases: enough to see that it works."""
CASES = {"starvation": 3, "priority": 3, "hits": 3, "waste": 3}
"""Of each family, where one does not show it."""


@pytest.mark.parametrize("disease", SICK)
def test_a_disease_is_found_in_a_case_that_can_be_replayed(disease, tmp_path, monkeypatch):
    monkeypatch.setattr(alarm, "SECONDS", 0.2)
    make, name = SICK[disease]
    (verdict,) = examine(make, CASES.get(name, 1), properties=named([name]), patience=SMALL).verdicts
    assert verdict.problem and verdict.case, f"{name} holds: worst {verdict.worst}"
    save(tmp_path / "case.json", Saved(("policy=sick",), name, verdict.problem, verdict.case))
    saved = load(tmp_path / "case.json")
    assert saved.case == verdict.case
    if name != "determinism":  # chance fails otherwise each time
        finding, _ = replayed(saved.case, make, verdict.property, Limits())
        assert finding and finding.problem == verdict.problem


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_well_passes_everything(name):
    report = examine(HEALTHY[name], 1)
    assert [(verdict.property.name, verdict.problem) for verdict in report.failed] == []
    judged = {verdict.property.name for verdict in report.verdicts if verdict.judged}
    assert judged == {one.name for one in PROPERTIES} - {"priority"}  # none of them goes by priority


def test_each_property_fails_on_some_sick_policy():
    found = {name for _, name in SICK.values()}
    assert found == {one.name for one in PROPERTIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_give_equal_cases_and_others_others(family):
    assert list(cases(family, 2, 5)) == list(cases(family, 2, 5))
    if family not in ("misfits", "ties", "stale_loads"):
        assert list(cases(family, 2, 5)) != list(cases(family, 2, 6))


def test_a_saved_case_is_the_same_when_it_is_read(tmp_path):
    for family in FAMILIES:
        (case,) = cases(family, 1, 0)
        save(tmp_path / "case.json", Saved(("policy=x",), "stall", "none", case))
        assert load(tmp_path / "case.json").case == case


def test_shrinking_leaves_what_matters():
    (case,) = cases("tiny_pool", 1, 0)

    def fails(tried: Case) -> bool:
        return any(request.prompt_length >= 3 for request in tried.requests)

    small = shrink(case, fails)
    assert [(one.prompt_length, one.max_tokens, one.arrival) for one in small.requests] == [(3, 1, 0.0)]
    assert small.aborts == () and small.run_ahead is None and not small.spec.forwards_tokens


def test_shrinking_keeps_to_its_patience():
    tried = []
    (case,) = cases("burst", 1, 0)
    shrink(case, lambda one: bool(tried.append(one)), patience=3 * case.tokens)
    assert sum(one.tokens for one in tried[:-1]) < 3 * case.tokens


def test_who_goes_away_is_served_no_further(monkeypatch):
    """By hand: 20 tokens of 10 ms each; away after 50 ms, and after all has ended."""
    requests = (Request(0, 0.0, 2, 20), Request(1, 0.0, 2, 20))
    case = Case("aborts", Spec(blocks=40, block_size=4), requests, ((0.05, 0), (9.0, 1)))
    outcome = attend(case, healthy)
    assert outcome.problem is None
    assert [(outcome.ended[id].outcome, outcome.ended[id].finished) for id in (0, 1)] == [
        ("aborted", 0.05),
        ("finished", pytest.approx(0.2)),
    ]
    monkeypatch.setattr(Scheduler, "abort", lambda self, id, now: None)
    problem = attend(case, healthy).problem
    assert problem and problem.property == "ends"
    assert problem.what == "request 0 went away at 0.05 s and was finished at 0.2 s"


def test_a_gap_is_counted_in_steps():
    """Two decodes and one served a step, in turns: each is passed over once. By hand: 0, 1, 0, 1, ..."""

    class InTurns:
        def fill(self, draft):
            draft.take_decodes(sorted(draft.decoding, key=lambda one: (one.step, one.id))[:1])
            for sequence in list(draft.waiting):
                draft.take(sequence, sequence.remaining)

        def run_ahead(self, spec):
            return 1

        def steady(self, draft):
            return 0

    requests = (Request(0, 0.0, 2, 6), Request(1, 0.0, 2, 6))
    outcome = attend(Case("stream", Spec(blocks=20, block_size=4), requests), InTurns)
    assert outcome.problem is None and outcome.seen.passed.steps == 1


def test_an_oracle_may_look():
    def make():
        return Composed(ChunkedPrefill(), order=Sjf(predictor=OracleLength()))

    report = examine(make, 1)
    (verdict,) = [one for one in report.verdicts if one.property.name == "oracle"]
    assert not verdict.judged and not verdict.problem
    assert not [one.problem for one in report.failed]


def test_what_goes_round_in_circles_ends_the_examination(monkeypatch):
    monkeypatch.setattr(alarm, "SECONDS", 0.2)
    report = examine(Circles, 3)
    assert report.cut == "returns" and report.served < 3 * len(FAMILIES)
    (verdict,) = [one for one in report.failed if one.property.name == "returns"]
    assert verdict.failed == 1 and "has computed for 0.2 s and does not return" in verdict.problem


def test_an_alarm_of_somebody_elses_is_left_alone(monkeypatch):
    monkeypatch.setattr(alarm, "SECONDS", 0.01)
    rung = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
    try:
        with alarm.bounded("a loop"):
            while not rung:
                pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    with pytest.raises(Broken, match="a loop has computed for"), alarm.bounded("a loop"):
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) is before


def ticking(micros):
    """A clock by which the nth decision takes so many microseconds."""
    now = 0.0

    def clock():
        nonlocal now
        now += micros() / 1e6
        return now

    return clock


def test_the_cost_of_decisions_is_the_clocks():
    found = cost(healthy, ticking(lambda: 7), sizes=(4, 16))
    assert found.micros == pytest.approx({4: 7, 16: 7}) and found.growth == pytest.approx(0, abs=1e-6)
    assert not found.problem


def test_a_policy_that_compares_everybody_with_everybody_is_found():
    """By its own count of the work: no timing."""
    found = cost(ComparesAll, lambda: ComparesAll.work / 1e6, sizes=(4, 16, 64))
    assert found.micros[64] == pytest.approx(256**2 + 64)  # four times as many wait as run
    assert "exponent 2.0" in found.problem


def test_growth_beyond_its_limit_is_a_problem():
    assert Cost({16: 1.0, 256: 10.0, 1024: 40.0}).growth == pytest.approx(1.0)
    assert "exponent 2.0" in Cost({16: 1.0, 256: 10.0, 1024: 160.0}).problem


def test_an_unknown_property_is_named():
    with pytest.raises(ValueError, match="--only speed: no such property; there are errors, returns, stall"):
        named(["speed"])
