"""Pipelines of two GPUs beside one GPU: throughput at saturation, and what stages wait for under which policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.bubbles import idle_causes, shares
from analysis.metrics import SLICE_COLUMNS, STEP_COLUMNS
from analysis.repetitions import apart
from engine.parallel.layout import Layout
from experiments.benchmarks.gpu.engine.crowd import Steady, in_flight
from experiments.benchmarks.gpu.engine.serving import policy
from experiments.benchmarks.ranks.bench import ONE, Bench
from playground import trace
from playground.backend import Backend
from playground.core import Request
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import Trace
from playground.workload.lengths import LengthSet
from playground.workload.source import OpenLoop
from policies.admission import FullPrompt
from policies.budget import ChunkedPrefill, TokenThrottling
from policies.composed import Composed
from policies.overlap import Overlap

MODEL = "qwen3-8b"
TARGET_RATIO = 1.75
TOKENS = 2048
"""Most of a step's prompt tokens."""


def time_saturation(bench: Bench) -> None:
    """Token throttling throughout; one GPU plans ahead, and may have Sarathi's budget if that is better for it."""
    report, sizes, path = bench.report, bench.sizes, bench.model(MODEL)
    with bench.crew(path, ONE, max_seqs=sizes.crowd, max_tokens=4 * TOKENS) as backend:
        alone = [
            _saturated(bench, backend, sizes.crowd, rules, f"one GPU, {name}")
            for name, rules in (("token throttling", throttling(2)), ("chunked prefill", policy(TOKENS, 2)))
        ]
    best = 0.0
    for split in sizes.splits:
        with bench.crew(path, Layout(stages=2, layers=split), max_seqs=2 * sizes.crowd, max_tokens=4 * TOKENS) as crew:
            found = _saturated(bench, crew, 2 * sizes.crowd, throttling(1), f"PP2 {split[0]} + {split[1]} layers")
        best = max(best, found)
    work = "saturation, PP2, times one GPU"
    report.row(work, best / max(alone), "times", target=TARGET_RATIO, part="pp")


def throttling(ahead: int) -> Composed:
    return Composed(TokenThrottling(max_prefill=TOKENS), overlap=Overlap(ahead))


def _saturated(bench: Bench, backend: Backend, size: int, rules: Composed, name: str) -> float:
    """Tokens of answers a second."""
    sizes = bench.sizes
    found: Steady = in_flight(backend, sizes.request, size, sizes.output, rules, sizes.window)
    bench.report.row(
        f"saturation, {sizes.prompt} + {sizes.output} x {size}, {name}", found.tokens_per_second, "tokens/s",
        tpot_ms=found.tpot * 1e3, steps=found.steps, ended=found.ended, part="pp",
    )  # fmt: skip
    return found.tokens_per_second


# --- bubbles

POLICIES = ("implicit grouping", "token throttling")


def rules(name: str) -> Composed:
    """Sarathi's budget, whose micro-batches are whatever is ready; or gLLM's, which evens them out."""
    if name == "implicit grouping":
        return Composed(ChunkedPrefill(TOKENS), admission=FullPrompt())
    return throttling(1)


def conversations(count: int, rate: float, longest: int, first: int = 0) -> list[Request]:
    """Lengths of Azure's conversations (2023), Poisson arrivals; the same each time but for their numbers."""
    rng = np.random.default_rng(5)
    prompts, outputs = LengthSet("azure_conv", "azure", longest - longest // 8, longest // 8).draw(rng, count)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Request(first + id, at, prompt, output, output) for id, (at, prompt, output) in enumerate(rows)]


def time_bubbles(bench: Bench) -> None:
    sizes, folder = bench.sizes, bench.folder
    with bench.crew(bench.model(MODEL), Layout(stages=2), max_tokens=4 * TOKENS) as backend:
        for place, name in enumerate(POLICIES):
            requests = conversations(sizes.conversations, sizes.rate, sizes.longest, place * 1_000_000)
            found = waited(backend, requests, rules(name), folder / f"bubbles-{place}")
            bench.report.row(
                f"bubbles, PP2, {name}", found.ratio, "share", part="bubbles", policy=name, blocks=backend.spec.blocks,
                conversations=sizes.conversations, rate=sizes.rate, longest=sizes.longest, **found.told,
            )  # fmt: skip


@dataclass(frozen=True)
class Waited:
    """What stages waited for, as shares of their time, and what clients did. Seconds."""

    causes: dict[str, float]
    ttft: float
    tpot: float
    makespan: float

    @property
    def ratio(self) -> float:
        """The bubble ratio: idle while somebody was in the system."""
        return sum(self.causes.values())

    @property
    def told(self) -> dict[str, Any]:
        means = {"ttft_ms": self.ttft * 1e3, "tpot_ms": self.tpot * 1e3, "makespan_s": self.makespan}
        return {"causes": self.causes} | means


def waited(backend: Backend, requests: Sequence[Request], rules: Composed, folder: Path) -> Waited:
    """Serve requests, whose arrivals count from now; record, and read what was recorded."""
    began = backend.now()
    source = OpenLoop([replace(request, arrival=began + request.arrival) for request in requests])
    with Trace(folder) as recorder:
        serve(source, Scheduler(backend.spec, rules, prefix_cache=False), backend, recorder)
    served, looks = (trace.read(folder, name).to_pandas() for name in ("requests", "looks"))
    steps = trace.read(folder, "steps", list(STEP_COLUMNS)).to_pandas()
    slices = trace.read(folder, "slices", list(SLICE_COLUMNS)).to_pandas()
    several = served[served["output_length"] > 1]
    return Waited(
        shares(idle_causes(served, steps, apart(steps, slices, backend.spec.block_size), looks)),
        float((served["first_token"] - served["arrival"]).mean()),
        float(((several["finished"] - several["first_token"]) / (several["output_length"] - 1)).mean()),
        float(served["finished"].max() - served["arrival"].min()),
    )
