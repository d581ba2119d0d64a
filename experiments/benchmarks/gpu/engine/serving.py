"""Workloads served through the real scheduler and policies, and what came back."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from engine.cuda.backend import CudaBackend
from playground.backend import Backend
from playground.core import Done, Request, Step
from playground.draft import How
from playground.loop import serve
from playground.scheduler import Ended, Event, Group, Scheduler
from playground.workload.source import OpenLoop, Source
from policies.admission import Always
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import LastArrived

SIZE = 16
"""Tokens of a KV block."""


class Recorder:
    """Keeps everything that came back."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.done: list[tuple[Step, Done]] = []
        self.ends: dict[int, Ended] = {}
        self.events: list[Event] = []

    def arrived(self, request: Request) -> None: ...
    def looked(self, now: float, commits: int) -> None: ...
    def waits(self) -> None: ...
    def launched(self, step: Step, group: Group) -> None: ...

    def committed(self, done: Done, step: Step) -> None:
        self.done.append((step, done))
        for id, tokens in done.tokens.items():
            if id not in self.ends:
                self.tokens.setdefault(id, []).extend(tokens)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    def ended(self, ended: Ended) -> None:
        self.ends[ended.request.id] = ended


class Watched:
    """A backend, and how long the host is busy before, in and after each launch."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.spec = inner.spec
        self.planning: dict[int, float] = {}
        """Seconds of the loop and the scheduler before each launch, by step."""
        self.preparing: dict[int, float] = {}
        """Seconds in `launch`."""
        self.landing: list[float] = []
        """Seconds for taking a completion's tokens in."""
        self._left = 0.0
        if isinstance(inner, CudaBackend):
            self._land = inner._land
            inner.__dict__["_land"] = self._timed_land

    def now(self) -> float:
        return float(self._inner.now())

    def launch(self, step: Step) -> None:
        entered = time.perf_counter()
        self.planning[step.id] = entered - self._left if self._left else 0.0
        self._inner.launch(step)
        self._left = time.perf_counter()
        self.preparing[step.id] = self._left - entered

    def wait(self, until: float = math.inf) -> Done | None:
        done: Done | None = self._inner.wait(until)
        self._left = time.perf_counter()
        return done

    def close(self) -> None:
        if isinstance(self._inner, CudaBackend):
            del self._inner.__dict__["_land"]

    def _timed_land(self, *arguments: Any) -> Done:
        began = time.perf_counter()
        done = self._land(*arguments)
        self.landing.append(time.perf_counter() - began)
        return done


@dataclass
class Served:
    """A workload that was served, and what it took."""

    recorder: Recorder
    watched: Watched
    scheduler: Scheduler
    began: float

    @property
    def tokens(self) -> dict[int, list[int]]:
        return self.recorder.tokens

    @property
    def duration(self) -> float:
        return max(done.finished for _, done in self.recorder.done) - self.began

    @cached_property
    def preemptions(self) -> int:
        return sum(event.kind in ("recompute", "swap") for event in self.recorder.events)

    def decodes(self, rows: int) -> list[tuple[Step, Done]]:
        """Steps of nothing but so many decodes; not the first and last few."""
        found = [
            (step, done)
            for step, done in self.recorder.done
            if len(step.slices) == rows and all(part.length == 1 for part in step.slices)
        ]
        return found[4:-4] if len(found) > 16 else found

    def tpot(self) -> list[float]:
        """Seconds from the first token to the last over the tokens between, of each request."""
        ends = self.recorder.ends.values()
        return [
            (e.finished - (e.sequence.first_token or 0.0)) / (e.sequence.returned - 1)
            for e in ends
            if e.sequence.returned > 1
        ]


def policy(tokens: int = 8192, ahead: int = 2, how: How = How.RECOMPUTE) -> Composed:
    return Composed(ChunkedPrefill(tokens), admission=Always(), victims=LastArrived(how), overlap=Overlap(ahead))


def served(backend: Backend, requests: Sequence[Request], rules: Composed, prefix_cache: bool = False) -> Served:
    """Serve requests, all of which arrive now."""
    gc.collect()
    recorder, began = Recorder(), backend.now()
    source = OpenLoop([replace(request, arrival=began) for request in requests])
    watched, scheduler = serve_all(source, backend, recorder, rules, prefix_cache)
    return Served(recorder, watched, scheduler, began)


def serve_all(
    source: Source, backend: Backend, recorder: Recorder, rules: Composed, prefix_cache: bool = False
) -> tuple[Watched, Scheduler]:
    """Serve what a source sends until it sends no more. Garbage is the caller's to collect before the clock counts."""
    watched = Watched(backend)
    scheduler = Scheduler(backend.spec, rules, prefix_cache=prefix_cache)
    try:
        serve(source, scheduler, watched, recorder)
    finally:
        watched.close()
    _forget(backend, scheduler)
    return watched, scheduler


def _forget(backend: Backend, scheduler: Scheduler) -> None:
    """Tell the backend which sequences have ended: the scheduler does so with the next step only."""
    ids = tuple(id for group in scheduler.groups for id in group.ends)
    backend.launch(Step(1 << 40, 0, 0.0, (), ends=ids))


def alike(count: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
    """Requests with random prompts of one length; what they say ends by number only."""
    return [Request(seed * 100_000 + id, 0.0, prompt, output, output) for id in range(count)]


def idle_share(done: Sequence[Done]) -> float:
    """The part of the time that the device spends between steps."""
    gaps = sum(max(later.started - earlier.finished, 0.0) for earlier, later in pairwise(done))
    return gaps / max(done[-1].finished - done[0].started, 1e-9)
