"""Every number of a summary, worked by hand on a run of four requests."""

import json
import subprocess
import sys
from math import inf
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.metrics import Objectives, Tables, bubble_ratio, describe, max_concurrent, percentile, summarize
from analysis.occupancy import busy_time, covered, kv_metrics, step_metrics
from analysis.tokens import gaps, token_times

NO_LOOKS = pd.DataFrame({"now": [], "commits": []}).astype({"commits": int})


def request(id, arrival, first_token, finished, prompt_length, output_length, outcome="finished", **more):
    row = dict(
        id=id, arrival=arrival, first_token=first_token, finished=finished, prompt_length=prompt_length,
        output_length=output_length, outcome=outcome, admitted=arrival, rank=0, preemptions=0, recomputed_tokens=0,
        cached_tokens=0, ttft_slo=inf, tpot_slo=inf, e2el_slo=inf,
    )  # fmt: skip
    return row | more


def step(id, started, finished, prefill=0, decode=0, free=10, count=1, ticks=None, group=0, lane="main", stages=None):
    return dict(
        step=id, group=group, lane=lane, planned=started, launched=started, host=0.0, started=started,
        finished=finished, prefill_tokens=prefill,
        decode_tokens=decode, blocks_free=free, count=count, ticks=ticks,
        stage_started=[s for s, _ in stages] if stages else None,
        stage_finished=[f for _, f in stages] if stages else None,
    )  # fmt: skip


def piece(step, sequence, start, length, samples=True, lane="main"):
    return dict(step=step, sequence=sequence, start=start, length=length, samples=samples, lane=lane)


@pytest.fixture
def tables() -> Tables:
    """Request 0: 4 tokens in, 3 out. 1: 2 in, 1 out. 2 is rejected; 3 is aborted after one token. Ten blocks."""
    requests = [
        request(0, 0.0, 1.0, 3.0, 4, 3, cached_tokens=1, preemptions=1, recomputed_tokens=5),
        request(1, 0.5, 2.0, 2.0, 2, 1),
        request(2, 1.0, None, 1.0, 900, 0, outcome="rejected", admitted=None, rank=None),
        request(3, 2.0, 3.0, 4.0, 2, 1, outcome="aborted"),
    ]
    steps = [step(0, 0.0, 1.0, 4, 0, 8), step(1, 1.0, 2.0, 2, 1, 7), step(2, 2.0, 3.0, 2, 1, 5)]
    slices = [piece(0, 0, 0, 4), piece(1, 0, 4, 1), piece(1, 1, 0, 2), piece(2, 0, 5, 1), piece(2, 3, 0, 2)]
    return Tables(pd.DataFrame(requests), pd.DataFrame(steps), pd.DataFrame(slices), 10, NO_LOOKS)


def test_counts_and_throughput(tables):
    summary = summarize(tables)
    assert [summary[key] for key in ("requests", "completed", "rejected", "aborted")] == [4, 2, 1, 1]
    assert summary["duration"] == 4.0
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (6, 4)
    assert summary["request_throughput"] == 2 / 4
    assert summary["output_throughput"] == 4 / 4
    assert summary["total_token_throughput"] == 10 / 4
    # Ends of tokens: 1, 2, 2, 3, 3 s.
    assert summary["max_output_tokens_per_s"] == 2
    assert summary["concurrency"] == (3.0 + 1.5) / 4
    assert summary["max_concurrent_requests"] == 2


def test_latencies_in_milliseconds(tables):
    summary = summarize(tables)
    assert summary["mean_ttft_ms"] == 1250  # 1.0 and 1.5 s
    assert summary["std_ttft_ms"] == 250
    assert summary["p90_ttft_ms"] == pytest.approx(1450)
    # One request alone has more than one token: (3 - 1) / (3 - 1).
    assert summary["mean_tpot_ms"] == summary["p99_tpot_ms"] == 1000
    assert summary["mean_itl_ms"] == 1000
    assert summary["mean_e2el_ms"] == 2250


def test_goodput_counts_a_single_token_as_tpot_zero_and_a_rejection_as_missed(tables):
    summary = summarize(tables, Objectives(ttft=2.0, tpot=0.5))
    assert summary["request_goodput"] == 1 / 4
    assert summary["slo_attainment"] == 1 / 4
    assert (summary["slo_attainment_ttft"], summary["slo_attainment_tpot"]) == (2 / 4, 1 / 4)


def test_without_objectives_there_is_no_goodput(tables):
    assert summarize(tables)["request_goodput"] is None


def test_a_requests_own_objective_goes_before_the_runs(tables):
    tables.requests.loc[0, "ttft_slo"] = 0.5
    assert summarize(tables, Objectives(ttft=2.0))["slo_attainment"] == 1 / 4
    assert summarize(tables)["slo_attainment_ttft"] == 1 / 4  # the other has none: always met


def test_memory_and_steps(tables):
    summary = summarize(tables)
    assert (summary["preemptions"], summary["wasted_tokens"]) == (1, 5)
    assert summary["prefix_hit_rate"] == 1 / 8
    assert summary["steps"] == 3
    assert summary["mean_tokens_per_step"] == pytest.approx(10 / 3)
    assert summary["cv_tokens_per_step"] == pytest.approx(np.std([4, 3, 3]) / (10 / 3))
    assert summary["mean_kv_usage"] == pytest.approx((0.2 + 0.3 + 0.5) / 3)
    assert summary["max_kv_usage"] == 0.5
    # Busy 0..3, someone in the system 0..4.
    assert summary["bubble_ratio"] == 1 / 4


def test_a_run_without_requests_has_no_numbers():
    requests = pd.DataFrame([request(0, 0.0, 1.0, 1.0, 1, 1)]).iloc[:0]
    empty = Tables(
        requests, pd.DataFrame([step(0, 0, 1)]).iloc[:0], pd.DataFrame([piece(0, 0, 0, 1)]).iloc[:0], 10, NO_LOOKS
    )
    summary = summarize(empty)
    assert summary["completed"] == 0
    assert summary["mean_ttft_ms"] is summary["request_throughput"] is summary["bubble_ratio"] is None


def test_merged_rows_stand_for_one_token_a_tick():
    requests = pd.DataFrame([request(7, 0.0, 1.0, 2.5, 4, 4)])
    steps = pd.DataFrame([step(0, 0, 1, 4), step(1, 1, 2.5, 0, 1, count=3, ticks=[1.5, 2.0, 2.5])])
    tokens = token_times(requests, steps, pd.DataFrame([piece(0, 7, 0, 4), piece(1, 7, 4, 1)]))
    assert tokens["index"].tolist() == [0, 1, 2, 3]
    assert tokens["time"].tolist() == [1.0, 1.5, 2.0, 2.5]
    assert gaps(tokens).tolist() == [0.5, 0.5, 0.5]
    assert step_metrics(steps)["mean_tokens_per_step"] == (4 + 3 * 1) / 4


def test_tokens_of_a_dropped_epoch_and_past_a_late_end_are_not_counted():
    requests = pd.DataFrame([request(1, 0.0, 1.0, 4.0, 2, 2)])
    steps = pd.DataFrame([step(i, i, i + 1) for i in range(5)])
    again = [piece(0, 1, 0, 2), piece(1, 1, 2, 1), piece(3, 1, 0, 3), piece(4, 1, 3, 1)]
    tokens = token_times(requests, steps, pd.DataFrame(again))
    assert tokens["time"].tolist() == [1.0, 4.0]


def test_percentiles_say_when_they_rest_on_little(tables):
    assert "p99_ttft_ms rests on 2 samples; 1,000 would be better" in summarize(tables)["notes"]
    with pytest.raises(ValueError, match=r"p99\.9 needs at least 10,000 samples, there are 9,999"):
        percentile(np.zeros(9_999), 99.9)
    assert percentile(np.zeros(10_000), 99.9) == 0
    assert describe("ttft", np.array([]))["p99_ttft_ms"] is None


def test_intervals_are_half_open():
    assert max_concurrent(np.array([0.0, 1.0]), np.array([1.0, 2.0])) == 1
    assert max_concurrent(np.array([0.0, 0.5]), np.array([1.0, 2.0])) == 2


def test_covered_counts_overlaps_once_and_holes_not():
    assert covered(np.array([0.0, 0.5, 3.0]), np.array([2.0, 1.0, 4.0])) == 3.0


def test_bubbles_of_a_pipeline_are_summed_over_its_stages():
    steps = pd.DataFrame([step(0, 0, 2, stages=[(0, 1), (1, 2)]), step(1, 1, 3, stages=[(1, 2), (2, 3)])])
    assert busy_time(steps) == (2, 4.0)
    assert bubble_ratio(pd.DataFrame([request(0, 0.0, 2.0, 3.0, 1, 1)]), steps) == pytest.approx(1 - 4 / 6)


def test_bubbles_of_replicas_count_each_ones_own_requests():
    steps = pd.DataFrame([step(0, 0, 1, group=0), step(1, 4, 6, group=1)])
    requests = pd.DataFrame([request(0, 0.0, 1.0, 1.0, 1, 1), request(1, 2.0, 6.0, 6.0, 1, 1, rank=1)])
    assert bubble_ratio(requests, steps) == pytest.approx(1 - 3 / 5)


def test_kv_use_is_weighted_by_how_long_it_lasted():
    steps = pd.DataFrame([step(0, 0, 1, free=10), step(1, 3, 4, free=0)])
    assert kv_metrics(steps, 10) == {"mean_kv_usage": 1 / 4, "max_kv_usage": 1.0}


@pytest.mark.parametrize("overrides", [[], ["policy=token_throttling", "kv.blocks=600", "workload.rate=30"]])
def test_merged_steps_change_no_number(overrides: list[str], tmp_path: Path) -> None:
    """A run that skipped ahead and one that stepped have the same summary, in every key."""
    summaries = []
    for skip in ("true", "false"):
        folder = tmp_path / skip
        options = [*overrides, "workload.requests=60", f"backend.skip_ahead={skip}", f"run_dir={folder}"]
        command = [sys.executable, "-m", "playground", *options]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
        summaries.append(json.loads((folder / "summary.json").read_text()))
    merged, stepped = summaries
    assert merged.keys() == stepped.keys()
    for key, value in stepped.items():
        assert merged[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key
