"""A decode step on two GPUs that share every layer, beside one."""

from __future__ import annotations

import statistics
from itertools import pairwise

from engine.parallel.layout import Layout
from experiments.benchmarks.gpu.ceilings import COPY
from experiments.benchmarks.gpu.engine.serving import alike, policy, served
from experiments.benchmarks.ranks.bench import ONE, Bench
from playground.backend import Backend
from playground.model import ModelShape

TARGET_MS, TARGET_RATIO = 12.0, 1.6


def time_decode(bench: Bench) -> None:
    report, sizes = bench.report, bench.sizes
    path, found = bench.model("qwen3-32b"), dict[int, float]()
    shape = ModelShape.read(path)
    weights = shape.weight_bytes - shape.embedding_bytes
    for ranks, layout in ((1, ONE), (2, Layout(tp=2))):
        with bench.crew(path, layout) as backend:
            found[ranks], device = decode_step(backend, sizes.rows, sizes.context, sizes.steps)
        limit = (weights + sizes.rows * sizes.context * shape.kv_bytes_per_token) / COPY / ranks
        wanted = TARGET_MS if ranks > 1 else 0.0
        work = f"decode {sizes.rows} x {sizes.context}, qwen3-32b, {_name(ranks)}"
        report.row(work, found[ranks] * 1e3, "ms", limit * 1e3, wanted, device_ms=device * 1e3, part="tp")
    report.row("decode on two GPUs, times as fast", found[1] / found[2], "times", target=TARGET_RATIO, part="tp")


def decode_step(backend: Backend, rows: int, context: int, steps: int, seed: int = 1) -> tuple[float, float]:
    """Seconds from one step's end to the next one's, and of those seconds of the device; planned one step ahead."""
    run = served(backend, alike(rows, context - steps // 2, steps, seed), policy(8192, 2))
    found = [done for _, done in run.decodes(rows)]
    between = statistics.median(later.finished - earlier.finished for earlier, later in pairwise(found))
    return between, statistics.median(done.finished - done.started for done in found)


def _name(ranks: int) -> str:
    return "one GPU" if ranks == 1 else "TP2"
