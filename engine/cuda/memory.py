"""How much of a GPU's memory the KV pool may take, and what the rest is for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError

GRAPHS = 1 << 30
"""Bytes left for captured graphs: their activations and the driver's own share of each graph."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device, by use; `host` is the page-locked pool for swapping."""

    weights: int
    state: int
    activations: int
    kv: int
    graphs: int
    host: int

    def __str__(self) -> str:
        names = ("weights", "kv", "activations", "graphs", "state", "host")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.2f} GB" for name in names)


def fitting_blocks(free: int, total: int, utilization: float, reserved: int, block: int) -> int:
    """Blocks of `block` bytes that fit, with `free` of `total` bytes free and `reserved` of these spoken for."""
    if not 0 < utilization <= 1:
        raise EngineError(f"backend.gpu_memory_utilization={utilization} must lie in (0, 1]")
    room = free - reserved - int((1 - utilization) * total)
    if room < block:
        raise EngineError(
            f"backend.gpu_memory_utilization={utilization}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free besides "
            f"the weights, which leaves no KV block of {block / 1e6:.1f} MB; raise it, lower limits.max_tokens, or "
            "take a smaller model"
        )
    return room // block
