"""How many tokens of a latent cache two GPUs hold: each its own sequences, or both the same ones."""

from __future__ import annotations

from engine.parallel.layout import Layout
from experiments.benchmarks.ranks.bench import Bench

MODEL = "moonlight-16b-a3b"
LAYOUTS = {"TP2": Layout(tp=2), "DPA2 + EP2": Layout(replicas=2, lockstep=True, ep=2)}
TARGET_RATIO = 1.9
"""`About 2`: what is stored besides takes a little."""


def time_capacity(bench: Bench) -> None:
    found: dict[str, int] = {}
    for name, layout in LAYOUTS.items():
        with bench.crew(bench.model(MODEL), layout, max_length=min(8192, bench.sizes.sequence)) as backend:
            spec = backend.spec
        found[name] = spec.blocks * spec.block_size * spec.ranks
        bench.report.row(f"capacity, {MODEL}, {name}", found[name], "tokens", part="mla")
    ratio = found["DPA2 + EP2"] / found["TP2"]
    bench.report.row("capacity, DPA2 times TP2", ratio, "times", target=TARGET_RATIO, part="mla")
