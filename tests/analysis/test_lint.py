"""Each check on a run that has the fault, and on one that has not; all runs are made up request by request."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.compare import differences, pairs
from analysis.intervals import interval, quantile
from analysis.lint import Run, intervals, lint, read
from experiments import run as runs
from experiments.composing import composed

RNG = np.random.default_rng(0)


def made(count=1200, rate=10.0, ttft=None, tpot=None, config=None, ended=None, arrival=None, **columns):
    """Requests at equal distances, 100 tokens each, with lively latencies around 0.1 s and 10 ms."""
    arrival = np.arange(count) / rate if arrival is None else np.asarray(arrival)
    ttft = 0.1 * RNG.gamma(8, 1 / 8, count) if ttft is None else np.asarray(ttft)
    tpot = 0.01 * RNG.gamma(8, 1 / 8, count) if tpot is None else np.asarray(tpot)
    rows = pd.DataFrame(
        {
            "id": range(count), "arrival": arrival, "first_token": arrival + ttft,
            "finished": arrival + ttft + 99 * tpot,
            "outcome": "finished", "output_length": 100, "prompt_length": 32, "cached_tokens": 0, "preemptions": 0,
            "ttft": ttft, "tpot": tpot, "e2el": ttft + 99 * tpot,
        }
        | columns
    )  # fmt: skip
    arrivals = rows[["id", "arrival", "prompt_length"]].assign(max_tokens=100, hash_block=16, hashes=[()] * count)
    return Run(Path("made"), rows if ended is None else rows[:ended], arrivals, config or {})


def codes(run):
    return {finding.code for finding in lint(run)}


def test_a_run_that_is_well_has_nothing():
    assert codes(made()) == set()


@pytest.mark.parametrize(("count", "missing"), [(15, "P50, P90, P99"), (60, "P90, P99"), (900, "P99")])
def test_percentiles_of_too_few(count, missing):
    (few,) = [one for one in lint(made(count)) if one.code == "few"]
    assert few.touches == missing


def test_requests_that_never_ended():
    assert "unended" in codes(made(ended=1190))


@pytest.mark.parametrize("outcome", ["rejected", "aborted"])
def test_requests_that_were_not_served(outcome):
    outcomes = ["finished"] * 1200
    outcomes[7] = outcome
    (found,) = lint(made(outcome=outcomes))
    assert found.code == "turned_away" and f"1 {outcome} of 1,200" in found.text


def test_a_tail_without_arrivals_is_counted_in_the_rate():
    """The last request takes as long as a fifth of the run; by hand: 1,194 of the others end within 119.9 s."""
    tpot = np.full(1200, 0.005)
    tpot[-1] = 30 / 99
    (found,) = [one for one in lint(made(ttft=np.full(1200, 0.1), tpot=tpot)) if one.code == "drain"]
    assert "30.1 s of 150 s (20%)" in found.text and "9.96 requests/s until then" in found.text


def test_everybody_at_once():
    assert codes(made(arrival=np.zeros(1200))) == {"at_once"}


def test_a_queue_that_grows():
    growing = np.linspace(0.1, 40, 1200)
    assert "saturated" in codes(made(ttft=growing))
    assert "saturated" not in codes(made(ttft=RNG.permutation(growing)))  # as long, but no trend


def test_a_burst_in_the_middle_is_no_growth():
    waits = np.full(1200, 0.1)
    waits[500:700] = 4.0
    assert "saturated" not in codes(made(ttft=waits))


def test_a_closed_loop():
    config = {"workload": {"_target_": "playground.workload.workloads.ClosedLoopWorkload"}}
    assert codes(made(config=config)) == {"closed"}


def shared(run, prefixes):
    run.arrivals["hashes"] = prefixes
    return run


def test_hits_beyond_what_prompts_share():
    """Every second prompt begins as the first one does: 599 times 16 tokens can be hits."""
    prefixes = [(0,) if id % 2 else (id + 1,) for id in range(1200)]
    within = [16 if id % 2 and id > 1 else 0 for id in range(1200)]
    assert codes(shared(made(cached_tokens=within), prefixes)) == set()
    beyond = [16 if id else 0 for id in range(1200)]
    assert codes(shared(made(cached_tokens=beyond), prefixes)) == {"hits"}


def test_a_hit_rate_where_nobody_shares_is_noted():
    (found,) = lint(made(config={"kv": {"prefix_cache": True}}))
    assert found.code == "no_sharing" and found.note
    assert lint(made(config={"kv": {"prefix_cache": False}})) == []


def test_a_warm_up_that_is_counted():
    """The first 200 requests are served ten times as fast."""
    ttft = 0.1 * RNG.gamma(8, 1 / 8, 1200)
    ttft[:200] /= 10
    (found,) = lint(made(ttft=ttft))
    assert found.code == "warm_up"
    dropped = int(found.text.split()[2].replace(",", ""))
    assert 180 <= dropped <= 260


def test_no_arrival_at_all():
    assert [one.code for one in lint(made(0))] == ["empty"]


def test_intervals_of_percentiles_need_enough_requests():
    rows = {(row["metric"], row["statistic"]): row for row in intervals(made(400))}
    assert set(rows) == {(name, statistic) for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "p50", "p90")}
    for row in rows.values():
        assert row["low"] < row["value"] < row["high"]


def test_an_interval_narrows_with_the_root_of_the_count():
    widths = [np.ptp(interval(RNG.normal(size=count))) for count in (400, 6400)]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)
    assert interval(np.arange(1000.0), quantile(50))[0] < 499.5


# --- two runs


def test_what_two_runs_have_in_common_cancels():
    """B takes 1 ms longer for each request, whatever it is: the interval of the difference has no width."""
    a = made()
    b = Run(a.folder, a.ended.assign(ttft=a.ended["ttft"] + 0.001), a.arrivals, {})
    found = {(one.metric, one.statistic): one for one in differences(pairs(a, b))}
    mean = found["ttft", "mean"]
    assert (mean.change, mean.low, mean.high) == pytest.approx((0.001, 0.001, 0.001))
    assert mean.verdict == "higher"
    assert found["ttft", "p99"].change == pytest.approx(0.001)
    assert found["tpot", "mean"].verdict == "no difference"


def test_chance_is_no_difference():
    a, b = made(), made()
    found = {(one.metric, one.statistic): one for one in differences(pairs(a, b))}
    assert found["ttft", "mean"].verdict == "no difference"
    slower = made(ttft=b.ended["ttft"] * 1.2)
    assert next(one for one in differences(pairs(a, slower))).verdict == "higher"


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (made(1000), "1,200 and 1,000 requests"),
        (made(rate=9.0), "request 1 has arrival 0.1 and 0.111111"),
        (made(prompt_length=33), "request 0 has prompt_length 32 and 33"),
    ],
)
def test_other_workloads_are_not_compared(other, line):
    with pytest.raises(ValueError, match=line):
        pairs(made(), other)


# --- as commands


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folders = []
    for policy in ("vllm_v1", "static"):
        folder = tmp_path_factory.mktemp("runs") / policy
        config = composed(
            [
                "model=tiny",
                "backend=sim",
                "workload.requests=120",
                "workload.rate=300",
                f"policy={policy}",
                "kv.blocks=500",
            ]
        )
        config.run_dir = str(folder)
        runs.execute(config)
        folders.append(folder)
    return folders


def test_the_commands(two, tmp_path, capsys):
    code = main(["lint", *map(str, two), "-o", str(tmp_path / "lint.json")])
    out = capsys.readouterr().out
    assert code == 1 and "few, touches P99" in out and "note: no_sharing" in out and "E2EL  p90" in out
    assert [row["run"] for row in json.loads((tmp_path / "lint.json").read_text())] == [str(folder) for folder in two]
    assert main(["compare", *map(str, two), "-o", str(tmp_path / "deep" / "compare.json")]) == 0
    out = capsys.readouterr().out
    assert "120 requests finished in both" in out and "higher" in out
    found = json.loads((tmp_path / "deep" / "compare.json").read_text())
    assert found["requests"] == 120 and found["rates"]["requests/s"][0] > 0
    means = [read(folder).served["ttft"].mean() for folder in two]
    assert found["differences"][0]["change"] == pytest.approx(means[1] - means[0])


def test_what_is_no_run_is_told_in_a_line(two, tmp_path, capsys):
    for words in (["lint", str(tmp_path)], ["compare", str(two[0]), str(tmp_path)]):
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
