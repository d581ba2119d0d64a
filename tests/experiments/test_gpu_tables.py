"""The tables of docs/gpu.md, from rows as the benchmark reports them."""

from pathlib import Path

from experiments.benchmarks.gpu import tables
from experiments.benchmarks.gpu.engine.report import Report

CHOICES = {"attention": "paged|sdpa", "cuda_graphs": "(False, False)", "asynchronous": "True"}


def record() -> dict:
    report = Report(out=None, budget=0.0)
    for depth, took in ((2, 5.0), (1, 5.5), (3, 5.0)):
        report.row(f"decode 1 x 512, run_ahead {depth}", took, "ms", 3.5, 4.9, idle_share=0.1 / depth)
    report.row("transformers generate, decode step 1 x 512", 20.0, "ms", ours_ms=5.0, ratio=4.0)
    report.row(
        "transformers generate_batch, 256 x (512 + 128)", 500.0, "tokens/s", ours_tokens_per_s=6500.0, ratio=13.0,
        finished=200, requests=256, seconds=90.0, choices=CHOICES,
    )  # fmt: skip
    report.row("llama-3.1-8b: decode step 112 x 1050", 9.0, "ms", 7.1, vllm_fp8_ms=11.25)
    report.row(
        "llama-3.1-8b: TPOT 112 in flight (1000 + 100), 512 a step", 30.0, "ms", 7.1, limit_with_prompts_ms=25.0,
        vllm_fp8_ms=11.25, output_tokens_per_s=3500.0, ttft_ms=250.0,
    )  # fmt: skip
    return {"rows": report.rows, "facts": {}, "checks": []}


def lines(table: str) -> list[str]:
    return table.splitlines()[2:]


def test_what_missed_its_target_says_so() -> None:
    assert lines(tables.targets(record())) == ["| decode 1 x 512 | 3.50 ms | 4.90 ms | 5.00 ms | 70% | **no** |"]


def test_depths_stand_side_by_side() -> None:
    assert lines(tables.ahead(record())) == ["| decode 1 x 512 | 5.50 ms | 5.00 ms | 10.0% | 5.0% |"]


def test_a_batch_that_was_cut_short_says_so() -> None:
    step, batch = lines(tables.transformers(record()))
    assert step == "| generate, decode step 1 x 512 | 20.0 ms | 5.00 ms | 4.0× |  |"
    assert "(cut after 90 s, 200 of 256 done) | 500 tokens/s | 6,500 tokens/s | 13.0× |" in batch
    assert batch.endswith("| paged sdpa, no graphs, asynchronous |")


def test_published_figures_stand_beside_both_limits() -> None:
    alone, loop = lines(tables.flight(record()))
    assert alone == "| decode step 112 x 1050 | 7.10 ms |  | 9.00 ms | 11.25 ms |  |  |"
    assert "| 7.10 ms | 25.0 ms | 30.0 ms | 11.25 ms | 3,500 | 250.0 ms |" in loop


def test_what_was_left_out_is_a_line() -> None:
    for make in tables.ENGINE.values():
        if make is not tables.found:
            assert make({"rows": [], "facts": {}, "checks": []}) == tables.MISSING


def test_every_table_has_its_place() -> None:
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")
    for name in (*tables.ENGINE, *tables.KERNELS):
        assert page.count(f"<!-- table:{name} -->") == 1
