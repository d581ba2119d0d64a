"""Accounts of requests: parts that sum to what was measured, and cases in which whose doing it was is known."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.blame.account import account, culprits, longest, read, sums
from playground.core import Request, Spec
from playground.sim.cost import Linear
from policies.budget import ChunkedPrefill, Orca
from policies.composed import Admissions, Chunks, Composed, Decodes
from tests.browser import browser
from tests.playground.check.test_branch import record
from tests.playground.strategies import Composition, Scenario, scenarios

ALL = (0.0, float("inf"))


def run(folder, requests, budget=None, **spec):
    options = dict(blocks=200, block_size=4, max_tokens=64)
    scenario = Scenario(Spec(**(options | spec)), tuple(requests), Composition(budget or ChunkedPrefill(64)), cost=COST)
    record(scenario, folder)
    return read(folder)


COST = Linear(0.01, 0.001)
"""10 ms a step, and 1 ms a token."""


@given(scenarios(), st.booleans())
def test_parts_sum_to_what_was_measured(tmp_path_factory, scenario, repeats):
    """Of every request of every scenario: without gaps, without overlaps, from its arrival to its end."""
    folder = tmp_path_factory.mktemp("run")
    if repeats:
        scenario = scenario.but(spec=replace(scenario.spec, repeats=True))
    record(scenario, folder)
    told = read(folder)
    for id, row in told.requests.iterrows():
        segments = account(told, id)
        assert sum(sums(segments, *ALL).values()) == pytest.approx(row["finished"] - row["arrival"], abs=1e-9)
        ends = [row["arrival"], *(one.end for one in segments)]
        assert [one.begin for one in segments] == ends[:-1]
        assert all(one.seconds > 0 for one in segments)
        assert all(abs(sum(weight for _, weight in one.others)) < 1 + 1e-9 for one in segments)
        assert all(other != id for one in segments if one.cause not in ("left out", "turn") for other, _ in one.others)


def test_a_huge_prompt_before_a_small_one(tmp_path):
    """160 tokens in steps of 64: the small one, there a moment later, waits for two more such steps and shares one."""
    told = run(tmp_path, [Request(0, 0.0, 160, 2), Request(1, 0.001, 4, 2)])
    segments = account(told, 1)
    parts = sums(segments, *ALL)
    # 0: 64 tokens until 74 ms; 1: 64 until 148 ms; 2: the last 32 and the 4 of the small one.
    assert parts["step under way"] == pytest.approx(0.073)
    assert parts["other prompts"] == pytest.approx(0.074)
    assert parts["same step"] == pytest.approx(0.046 * 32 / 36)
    assert parts["own prompt"] == pytest.approx(0.046 * 4 / 36)
    assert [id for id, _ in culprits(segments, "other prompts")] == [0]
    assert longest(segments, "other prompts") == [(1, pytest.approx(0.074))]
    assert [id for id, _ in culprits(segments, "same step")] == [0]


def test_decodes_beside_a_prompt(tmp_path):
    """Alone a decode takes 11 ms; beside 40 tokens of a prompt 51."""
    told = run(tmp_path, [Request(0, 0.0, 4, 12), Request(1, 0.03, 40, 1)])
    segments = account(told, 0)
    parts = sums(segments, *ALL)
    assert parts["beside prompts"] == pytest.approx(0.040)
    assert culprits(segments, "beside prompts") == [(1, pytest.approx(0.040))]
    assert parts["decode"] == pytest.approx(11 * 0.011)


def test_a_full_pool(tmp_path):
    """Room for one of them: the second waits for the first one's blocks, and is told whose they were."""
    told = run(tmp_path, [Request(0, 0.0, 32, 8), Request(1, 0.0, 32, 2)], blocks=11)
    segments = account(told, 1)
    parts = sums(segments, *ALL)
    first = told.requests.loc[0]
    assert parts["memory"] == pytest.approx(first["finished"] - first["arrival"], abs=0.012)
    assert culprits(segments, "memory")[0][0] == 0


def test_a_full_pool_of_one_rank_in_lockstep(tmp_path):
    """The trace has the sum of free blocks only: the other rank's pool is empty, and helps nobody."""
    requests = [Request(0, 0.0, 32, 8), Request(1, 0.0, 4, 12), Request(2, 0.0, 32, 2)]
    told = run(tmp_path, requests, blocks=11, ranks=2, lockstep=True)
    assert told.requests["rank"].tolist() == [0, 1, 0]
    segments = account(told, 2)
    assert sums(segments, *ALL)["memory"] == pytest.approx(told.requests.loc[0, "finished"], abs=0.05)
    assert culprits(segments, "memory")[0][0] == 0


def test_no_seat(tmp_path):
    told = run(tmp_path, [Request(0, 0.0, 4, 8), Request(1, 0.0, 4, 2)], max_seqs=1)
    segments = account(told, 1)
    assert max(sums(segments, *ALL), key=sums(segments, *ALL).get) == "seats"


def test_behind_somebody_who_has_no_room(tmp_path):
    """First come, first served: the small one would fit, and waits behind one that does not."""
    requests = [Request(0, 0.0, 24, 10), Request(1, 0.001, 24, 2), Request(2, 0.002, 4, 2)]
    segments = account(run(tmp_path, requests, blocks=11), 2)
    assert culprits(segments, "queue")[0][0] == 1


def test_preempted_and_computed_again(tmp_path):
    """Two that outgrow the pool: who came last loses its KV, waits for memory, and is computed again."""
    told = run(tmp_path, [Request(0, 0.0, 8, 24), Request(1, 0.0, 8, 24)], blocks=10)
    parts = sums(account(told, 1), *ALL)
    assert told.requests.loc[1, "preemptions"] >= 1
    assert parts["memory"] > 0 and parts["computed again"] > 0
    assert "computed again" not in sums(account(told, 0), *ALL)


def test_left_out_of_steps_of_others(tmp_path):
    """A policy that decodes only when there are no prompts."""

    class PromptsFirst:
        def phases(self, draft):
            yield Chunks()
            yield Admissions()
            if not draft.tokens:
                yield Decodes()

    scenario = Scenario(
        Spec(blocks=200, block_size=4, max_tokens=64),
        (Request(0, 0.0, 4, 4), Request(1, 0.015, 60, 1)),
        Composition(Orca()),
        cost=COST,
    )
    record(scenario, tmp_path, policy=Composed(PromptsFirst()))
    segments = account(read(tmp_path), 0)
    assert sums(segments, *ALL)["left out"] == pytest.approx(0.070)
    assert culprits(segments, "left out") == [(1, pytest.approx(0.070))]


@pytest.fixture
def folder(tmp_path):
    run(tmp_path / "run", [Request(id, 0.004 * id, 20 + id, 12) for id in range(12)], blocks=60)
    return tmp_path / "run"


def test_the_command(folder, tmp_path, capsys):
    data, page = tmp_path / "out" / "blame.json", tmp_path / "blame.html"
    assert main(["blame", str(folder), "--worst", "3", "--json", str(data), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.count("whose doing") == 3 and "together: " in out
    told = json.loads(data.read_text())
    requests = pd.read_parquet(folder / "requests.parquet")
    slowest = requests.assign(e2el=requests["finished"] - requests["arrival"]).nlargest(3, "e2el")
    assert [one["request"] for one in told] == slowest["id"].tolist()
    for one in told:
        for part in one["parts"]:
            seconds = pytest.approx(part["to_first_token"] + part["after"])
            if 0 < len(part["steps"]) < 10 and part["cause"] != "front end":
                assert sum(step["seconds"] for step in part["steps"]) == seconds
            assert all(other["request"] != one["request"] for other in part["requests"])
        assert sum(part["to_first_token"] for part in one["parts"]) == pytest.approx(one["ttft"])
        assert sum(part["to_first_token"] + part["after"] for part in one["parts"]) == pytest.approx(one["e2el"])
    assert main(["blame", str(folder), "--request", "7", "--request", "2"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("request")] == [
        "request 7",
        "request 2",
    ]


def test_the_page(folder, tmp_path):
    page = tmp_path / "blame.html"
    main(["blame", str(folder), "--worst", "2", "--html", str(page)])
    with browser() as shown:
        shown.open(page)
        assert shown.errors == [] and shown.requested == [page.resolve().as_uri()]
        assert shown.run("document.querySelectorAll('svg').length") == 2
        widths = shown.run(
            "[...document.querySelectorAll('svg')].map(one => [...one.querySelectorAll('rect')]"
            ".reduce((sum, bar) => sum + bar.width.baseVal.value, 0))"
        )
        assert widths == pytest.approx([1100, 1100], rel=0.02)
        assert shown.run("[...document.querySelectorAll('h2')].map(one => '#' + one.id)") == shown.run(
            "[...document.querySelectorAll('a')].map(one => one.getAttribute('href'))"
        )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--request", "99"], "--request 99: no such request ended in "),
        (["--worst", "0"], "--worst 0 must be at least 1"),
    ],
)
def test_mistakes_are_told_in_a_line(folder, capsys, words, line):
    assert main(["blame", str(folder), *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1
