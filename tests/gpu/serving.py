"""A workload through the real scheduler and a policy on a real GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.cuda.backend import CudaBackend
from engine.load import load_model
from engine.models.decoder import Decoder
from playground.backend import Backend
from playground.core import Done, Request, Step
from playground.draft import How
from playground.loop import serve
from playground.scheduler import Ended, Event, Scheduler
from playground.trace import NoTrace
from playground.workload.source import OpenLoop
from policies.admission import Always
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import LastArrived

SIZE = 8
"""Tokens of a KV block."""

DEVICE = "cuda"


class Collected(NoTrace):
    """What came back."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Ended] = {}
        self.preemptions = 0

    def committed(self, done: Done, step: Step) -> None:
        for id, tokens in done.tokens.items():
            if id not in self.ends:
                self.tokens.setdefault(id, []).extend(tokens)

    def happened(self, event: Event) -> None:
        self.preemptions += event.kind in ("recompute", "swap")

    def ended(self, ended: Ended) -> None:
        self.ends[ended.request.id] = ended

    @property
    def cached(self) -> int:
        return sum(end.sequence.cached_tokens for end in self.ends.values())


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(folder, dtype, DEVICE)


def backend_for(model: Decoder, **options: Any) -> CudaBackend:
    """Started, with a pool in which reading what was never written shows."""
    sizes = dict(blocks=200, block_size=SIZE, max_seqs=8, max_tokens=256, max_length=120)
    backend = CudaBackend(model, **(sizes | options))
    backend.now()
    backend._pool.data.fill_(math.nan)
    backend._timeline.synchronize()
    return backend


def policy(tokens: int = 256, ahead: int = 1, how: How = How.RECOMPUTE) -> Composed:
    return Composed(ChunkedPrefill(tokens), admission=Always(), victims=LastArrived(how), overlap=Overlap(ahead))


def served(backend: Backend, requests: Sequence[Request], rules: Composed, prefix_cache: bool = False) -> Collected:
    """All requests arrive now."""
    collected, now = Collected(), backend.now()
    source = OpenLoop([replace(request, arrival=now) for request in requests])
    with torch.inference_mode():
        serve(source, Scheduler(backend.spec, rules, prefix_cache=prefix_cache), backend, collected)
    return collected
