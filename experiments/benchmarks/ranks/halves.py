"""Two-batch overlap: what it hides of a tensor-parallel prefill's communication, and what halving costs.

One GPU that computes what one of two computes, with nobody to exchange anything with, is the negative control.
"""

from __future__ import annotations

import statistics

from engine.overlap import Overlap
from engine.parallel.layout import Layout
from experiments.benchmarks.gpu.engine.serving import alike, policy, served
from experiments.benchmarks.ranks import shapes
from experiments.benchmarks.ranks.bench import ONE, Bench
from experiments.benchmarks.ranks.tensor import decode_step
from playground.backend import Backend

MODEL = "qwen3-32b"
KINDS = ("none", "two_batch")


def time_overlap(bench: Bench) -> None:
    whole = bench.config(MODEL)
    paths = {
        "half a model on one GPU": (bench.written("half", shapes.share(whole, 2)), ONE),
        "TP2": (bench.written(MODEL, whole), Layout(tp=2)),
    }
    seconds: dict[tuple[str, str], float] = {}
    for place, (path, layout) in paths.items():
        for kind in KINDS:
            with bench.crew(path, layout, overlap=Overlap(kind)) as backend:
                seconds[place, kind] = _prefill(bench, backend)
                small, _ = decode_step(backend, bench.sizes.rows, bench.sizes.context, bench.sizes.steps)
            count, length = bench.sizes.prompts
            bench.report.row(
                f"prefill {count} x {length}, {MODEL}, {place}, overlap {kind}", seconds[place, kind] * 1e3, "ms",
                decode_ms=small * 1e3, part="overlap",
            )  # fmt: skip
    for kind in KINDS:
        exposed = seconds["TP2", kind] - seconds["half a model on one GPU", "none"]
        work = f"communication and halving, in the open, overlap {kind}"
        bench.report.row(work, exposed * 1e3, "ms", part="overlap", share=exposed / seconds["TP2", kind])
    gain = seconds["TP2", "none"] / seconds["TP2", "two_batch"]
    bench.report.row("two-batch overlap, times as fast", gain, "times", part="overlap")


def _prefill(bench: Bench, backend: Backend) -> float:
    """Median seconds on the devices of one step of whole prompts."""
    count, length = bench.sizes.prompts
    spans = []
    for turn in range(bench.sizes.rounds):
        run = served(backend, alike(count, length, 1, seed=turn + 50), policy(count * length, 1))
        ((_, done),) = run.recorder.done
        spans.append(done.finished - done.started)
    return statistics.median(spans[1:] or spans)
