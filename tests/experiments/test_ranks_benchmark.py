"""The benchmark of many ranks, tried with tiny models over Gloo: what it says it measures is measured."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.ranks.__main__ import PARTS, run
from experiments.benchmarks.ranks.bench import Bench
from experiments.benchmarks.ranks.sizes import TINY
from tests.engine.parallel.forked import forked


def bench(folder: Path, ranks: int = 2) -> Bench:
    return Bench(Report(folder, 60.0, "by hand", "ranks"), TINY, folder, "cpu", ranks, forked)


def rows(tried: Bench) -> dict[str, dict]:
    return {row["work"]: row for row in tried.report.rows}


def test_a_decode_step_of_two_ranks_is_held_against_one(tmp_path):
    tried = bench(tmp_path)
    assert run(tried, ["tp"]) == 0
    alone, both, ratio = tried.report.rows
    assert ratio["measured"] == pytest.approx(alone["measured"] / both["measured"])
    assert both["limit"] == pytest.approx(alone["limit"] / 2)
    record = json.loads((tmp_path / "ranks.json").read_text())
    assert record["rows"] == tried.report.rows and record["method"] == "by hand"


def test_with_one_device_its_half_is_measured_and_the_rest_is_named(tmp_path):
    tried = bench(tmp_path, ranks=1)
    assert run(tried, ["tp"]) == 1
    assert [row["work"] for row in tried.report.rows] == ["decode 4 x 32, qwen3-32b, one GPU"]
    (failure,) = tried.report.failures
    assert failure["error"] == "EngineError: needs 2 GPUs, and this machine has 1"


def test_tokens_of_a_mixture_in_lockstep_are_those_of_one_rank(tmp_path):
    tried = bench(tmp_path)
    assert run(tried, ["dpa"]) == 0
    assert len(tried.report.checks) == 4
    for check in tried.report.checks:
        assert check["differing"] == {} and check["logprob_error"] < 1e-4
        assert check["steps_with_an_idle_replica"] > 0 and check["steps_with_uneven_prefill"] > 0


def test_stages_wait_less_often_under_the_policy_that_is_for_that(tmp_path):
    tried = bench(tmp_path)
    assert run(tried, ["bubbles"]) == 0
    for row in tried.report.rows:
        assert 0 < row["measured"] < 1 and row["measured"] == pytest.approx(sum(row["causes"].values()))
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0


def test_every_part_has_a_name():
    assert list(PARTS) == ["tp", "pp", "dpa", "mla", "bubbles", "overlap"]
