"""Capacity: the search finds what there is to find, its runs are kept, and a queue that can be computed has the rate
that it should."""

import json
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.intervals import over_seeds
from experiments.__main__ import main
from experiments.capacity.find import find
from experiments.capacity.objectives import missed, objective
from experiments.capacity.search import STEPS, Search
from experiments.settings import SettingError
from experiments.trials import FILE, Trials

FIXED = (
    "policy=orca", "limits.max_seqs=1", "model=tiny", "kv.blocks=100", "workload.max_length=256",
    "workload.lengths.prompt.mean=64", "workload.lengths.prompt.sigma=0.001",
    "workload.lengths.output.mean=4", "workload.lengths.output.sigma=0.001",
)  # fmt: skip
"""One at a time, all alike: a queue with one server and a service time that never differs."""


def searched(limit, start, tolerance=0.05):
    search = Search(start, tolerance)
    while (rate := search.rate) is not None:
        search.tell(rate, rate <= limit)
    return search


@given(st.floats(0.01, 500), st.floats(0.5, 50), st.floats(0.01, 0.3))
def test_a_limit_is_found_within_the_tolerance(limit, start, tolerance):
    search = searched(limit, start, tolerance)
    if not start / 2**STEPS <= limit <= start * 2**STEPS / 2:
        return
    assert search.low <= limit < search.high <= search.low * (1 + tolerance)
    assert abs(log(search.capacity / limit)) <= log(1 + tolerance)
    assert len(search.asked) <= STEPS + 9


def test_what_always_or_never_holds_ends_all_the_same():
    assert searched(inf, 1).capacity == inf
    assert searched(0, 1).capacity == 0
    assert not searched(0, 1).found


def test_all_searches_ask_on_one_grid():
    rates = {rate for limit in (3, 17, 90) for rate, _ in searched(limit, 4).asked}
    assert all(abs(log(rate / 4, 2) * 64 - round(log(rate / 4, 2) * 64)) < 1e-9 for rate in rates)


@pytest.mark.parametrize(("start", "tolerance"), [(0, 0.1), (-1, 0.1), (inf, 0.1), (1, 0), (1, 1)])
def test_wrong_searches_are_refused(start, tolerance):
    with pytest.raises(SettingError, match="--"):
        Search(start, tolerance)


def test_objectives():
    summary = {"p90_ttft_ms": 210.0, "mean_tpot_ms": 40.0, "slo_attainment": 0.93, "p99_e2el_ms": None}
    assert objective("ttft_p90=0.2").value(summary) == 0.21
    words = ("ttft_p90=0.2", "ttft_p90=0.22", "tpot_mean=0.05", "attainment=0.9", "attainment=0.95", "e2el_p99=9")
    held = [objective(word).holds(summary) for word in words]
    assert held == [False, True, True, True, False, False]
    assert missed((objective("ttft_p90=0.2"),), summary | {"rejected": 3}, True) == [
        "ttft_p90=0.21",
        "the queue grows",
        "3 turned away",
    ]


@pytest.mark.parametrize(
    "word", ["ttft=1", "ttft_p95=1", "speed_p90=1", "ttft_p90", "ttft_p90=x", "ttft_p90=0", "attainment=2"]
)
def test_wrong_objectives_are_named(word):
    with pytest.raises(SettingError, match=f"--slo {word}: "):
        objective(word)


def test_an_interval_by_hand():
    """Of 1, 2, 3: mean 2, standard error 1/sqrt(3), t of two degrees of freedom 4.3027."""
    assert over_seeds([1, 2, 3]) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), rel=1e-4)
    assert all(value != value for value in over_seeds([1]))


# --- trials


def test_a_trial_is_made_once(tmp_path):
    wanted = [("workload.requests=5", "seed=1"), ("workload.requests=5", "seed=2"), ("workload.requests=5", "seed=1")]
    told = []
    trials = Trials(tmp_path, 2)
    found = trials.run(wanted, lambda done, total: told.append((done, total)))
    assert [trial.overrides for trial in found] == wanted and found[0] is found[2]
    assert told == [(1, 2), (2, 2)] and len(trials) == 2
    assert {trial.summary["completed"] for trial in found} == {5}

    again = Trials(tmp_path)
    again.run(wanted, lambda done, total: pytest.fail("run again"))
    kept = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(kept[:-40])  # as a kill leaves it
    cut = Trials(tmp_path)
    assert len(cut) == 1
    assert cut.run(wanted)[1].summary == found[1].summary


def test_a_trial_that_fails_says_why(tmp_path):
    (failed,) = Trials(tmp_path).run([("policy=orcas",)])
    assert failed.problem.startswith("policy=orcas: no such option") and not failed.summary


def test_capacity_of_a_queue_that_can_be_computed(tmp_path):
    """M/D/1 waits rho S / (2 (1 - rho)) on average: S at rho = 2/3. By the formula of Pollaczek and Khinchine."""
    trials = Trials(tmp_path)
    (alone,) = trials.run([(*FIXED, "workload.requests=20", "workload.rate=0.1")])
    service, first = alone.summary["mean_e2el_ms"] / 1e3, alone.summary["mean_ttft_ms"] / 1e3
    limit = objective(f"ttft_mean={first + service}")
    (found,) = find({"queue": (*FIXED, "workload.requests=2000")}, (limit,), range(2), trials, 0.5 / service, 0.08)
    assert found.mean == pytest.approx(2 / 3 / service, rel=0.1)
    assert set(found.missed) <= {"ttft_mean", "the queue grows"} and all(found.found.values())


# --- the command


def test_the_command(tmp_path, capsys):
    words = [
        "capacity", "--slo", "ttft_p90=0.05", "--seeds", "2", "--start", "20", "--tolerance", "0.9",
        "-o", str(tmp_path),
        "--each", "policy=static", "policy=static policy.budget.batch=2",
        "--all", "model=tiny", "kv.blocks=500", "workload.requests=30", "workload.max_length=256",
    ]  # fmt: skip
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert (
        "requests/s at which ttft_p90 <= 0.05" in out and "policy=static policy.budget.batch=2" in out and "x " in out
    )
    assert "round 1: 4 of 4 searches go on, 0 runs so far" in err
    kept = json.loads((tmp_path / "capacity.json").read_text())
    assert [len(one["by_seed"]) for one in kept["capacities"]] == [2, 2]
    assert main(words) == 0  # all of it is known
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--slo", "ttft=1"], "--slo ttft=1: give METRIC_STATISTIC=SECONDS"),
        (["--slo", "ttft_p90=1", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--slo", "ttft_p90=1", "--start", "0"], "--start 0 must be a rate above 0"),
        (["--slo", "ttft_p90=1", "--each", "policy=orcas"], "policy=orcas: no such option"),
        (["--slo", "ttft_p90=1", "--all", "workload=closed_loop"], "workload"),
        (["--slo", "ttft_p90=1", "--", "kv.blocks=1"], "kv.blocks=1: not known here"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, capsys, words, line):
    assert main(["capacity", "-o", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert line in err[-1] and err[-1].startswith("error: ")
