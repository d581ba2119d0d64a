"""The benchmark of many ranks, tried with tiny models over Gloo: what it says it measures is measured."""

import json
from pathlib import Path

import pytest

from engine.parallel.layout import Layout
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.ranks import tables
from experiments.benchmarks.ranks.__main__ import run
from experiments.benchmarks.ranks.bench import Bench
from experiments.benchmarks.ranks.sizes import TINY
from experiments.benchmarks.ranks.twin import with_twins
from tests.engine.parallel.forked import forked


def bench(folder: Path, ranks: int = 2) -> Bench:
    return Bench(Report(folder, 60.0, "by hand", "ranks"), TINY, folder, "cpu", ranks, forked)


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


@pytest.mark.parametrize("ranks, share", [(1, 0.4), (2, None)])
def test_ranks_that_share_a_gpu_share_its_memory(tmp_path, ranks, share, monkeypatch):
    given = {}

    class Told(Exception): ...

    def hire(config, hire):
        given.update(config.sizes)
        assert config.share_gpus
        raise Told

    monkeypatch.setattr("experiments.benchmarks.ranks.bench.ParallelBackend", hire)
    tried = Bench(Report(None, 60.0), TINY, tmp_path, "cuda", ranks, forked, share_gpus=True)
    with pytest.raises(Told), tried.crew("anything", Layout(tp=2)):
        pass
    assert given.get("memory_utilization") == share


def test_tokens_of_a_mixture_in_lockstep_are_those_of_one_rank(tmp_path):
    tried = bench(tmp_path)
    assert run(tried, ["dpa"]) == 0
    assert len(tried.report.checks) == 4
    for check in tried.report.checks:
        assert check["differing"] == {} and check["logprob_error"] < 1e-4
        assert check["steps_with_an_idle_replica"] > 0 and check["steps_with_uneven_prefill"] > 0


def test_what_stages_wait_for_adds_up_to_the_bubble_ratio(tmp_path):
    tried = bench(tmp_path)
    assert run(tried, ["bubbles"]) == 0
    for row in tried.report.rows:
        assert 0 < row["measured"] < 1 and row["measured"] == pytest.approx(sum(row["causes"].values()))
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0


def test_tables_show_what_was_reached_what_failed_and_what_was_wrong():
    row = dict(limit=0.0, target=12.0, unit="ms", part="tp")
    rows = [row | dict(work="slow", measured=13.0), row | dict(work="fast", measured=11.0)]
    rows += [dict(work="both", limit=0.0, target=1.6, unit="times", measured=1.7, part="tp")]
    record = dict(rows=rows, failures=[dict(name="pp", error="needs 2 GPUs")], checks=[dict(name="dpa", good=False)])
    record["facts"] = dict(device="H200", torch="2", triton="3", driver="5")
    told = tables.measured(record)
    assert "| slow |  | 12.00 ms | 13.00 ms | **no** |" in told
    assert "| fast |  | 12.00 ms | 11.00 ms | yes |" in told
    assert "| both |  | 1.60× | 1.70× | yes |" in told
    assert "- pp: needs 2 GPUs\n- dpa: not as one GPU" in told


def test_bubbles_stand_beside_those_of_the_simulated_twin():
    causes = dict(host=0.1, upstream=0.2)
    row = dict(policy="token throttling", part="bubbles", unit="share", causes=causes, measured=0.3, limit=0, target=0)
    row |= dict(ttft_ms=50.0, tpot_ms=7.0, blocks=4000, conversations=20, rate=20.0, longest=4000)
    record = with_twins({"rows": [row | {"work": "bubbles, PP2, token throttling"}]})
    assert len(with_twins(record)["rows"]) == 2
    ours, twin = tables.bubbles(record).splitlines()[2:]
    assert ours == "| token throttling | 30.0% | 10.0% | 20.0% | 0.05 s | 7.0 ms |"
    simulated = record["rows"][1]
    assert twin.startswith(f"| token throttling, simulated | {simulated['measured']:.1%} |")
    assert simulated["measured"] == pytest.approx(sum(simulated["causes"].values())) and simulated["causes"] != causes
