"""Simulated runs beside their hardware runs: which belong together, and how far simulation is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SIMULATED = "SimBackend"
OWN = ("backend", "device", "links", "logger", "plots", "study", "run_dir", "weights", "model")
"""Of a configuration, what twins need not share. The model they do, by its name in `run.json`."""
FIGURES = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms", "mean_tpot_ms",
    "p50_tpot_ms", "p90_tpot_ms", "mean_e2el_ms", "p90_e2el_ms", "preemptions", "mean_kv_usage",
)  # fmt: skip


def setting(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """What twins have in common: configuration, model, and the limits that were found at the start."""
    spec = described.get("spec") or {}
    kept = {name: value for name, value in config.items() if name not in OWN}
    return kept | {"model": described.get("model"), "blocks": spec.get("blocks"), "block_size": spec.get("block_size")}


def twins(settings: Sequence[Mapping[str, Any]], backends: Sequence[str | None]) -> list[tuple[int, int]]:
    """(hardware, simulated) places of runs that differ in nothing but where they ran; each run in one pair at most."""
    pairs, taken = [], set()
    for one, backend in enumerate(backends):
        if backend == SIMULATED or not settings[one]:
            continue
        for other, name in enumerate(backends):
            if name == SIMULATED and other not in taken and settings[other] == settings[one]:
                taken.add(other)
                pairs.append((one, other))
                break
    return pairs


def errors(hardware: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, float | None]:
    """Simulated over measured less one, by figure; None where either is missing or nothing was measured."""
    return {
        name: simulated[name] / hardware[name] - 1 if hardware.get(name) and simulated.get(name) is not None else None
        for name in FIGURES
    }
