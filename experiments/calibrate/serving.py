"""Serving on the backend that is being calibrated: steps as they come, and what the host does between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from experiments.calibrate.design import by_magnitude
from experiments.progress import Meter, Watched
from playground.backend import Backend
from playground.core import Arrive, Request, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import Trace
from playground.workload.source import Event, OpenLoop

BATCHES = (1, 4, 16, 64, 128, 256)
"""Requests that come at once, and decode together."""
SHORT_PROMPT, SHORT_ANSWER = 32, 24
PROMPTS, ANSWERS = (16, 3000), (8, 160)
"""Tokens of many requests at once, from and to, evenly by order of magnitude."""


def requests(spec: Spec, seed: int, many: int, most_context: int, first: int = 1 << 32) -> list[list[Request]]:
    """Batches, each to be served when the one before has ended; in the last one so `many`, of any size
    up to `most_context`."""
    random, ids = Random(seed), iter(range(first, first + (1 << 20)))
    batches = [[(SHORT_PROMPT, SHORT_ANSWER)] * size for size in BATCHES if size <= spec.max_seqs]
    batches.append([(by_magnitude(random, *PROMPTS), by_magnitude(random, *ANSWERS)) for _ in range(many)])
    room = min(spec.max_length, spec.blocks * spec.block_size, most_context) - 1
    return [
        [Request(next(ids), 0.0, min(p, max(room - a, 1)), a, a) for p, a in batch if a < room] for batch in batches
    ]


class Batches:
    """Each batch arrives when somebody looks after the one before has ended."""

    total: int | None

    def __init__(self, batches: Sequence[Sequence[Request]]) -> None:
        self.total = sum(map(len, batches))
        self._batches: Iterator[Sequence[Request]] = iter(batches)
        self._open: set[int] = set()
        self._next()

    def _next(self) -> None:
        batch = next(self._batches, [])
        self._open = {request.id for request in batch}
        self._source = OpenLoop(batch)

    def due(self) -> float:
        return self._source.due()

    def take(self, now: float) -> list[Event]:
        requests = [event.request for event in self._source.take(now) if isinstance(event, Arrive)]
        return [Arrive(replace(request, arrival=now)) for request in requests]

    def finished(self, request_id: int, now: float) -> None:
        self._open.discard(request_id)
        if not self._open:
            self._next()


def log(
    backend: Backend, scheduler: Scheduler, batches: Sequence[Sequence[Request]], folder: Path, shown: Meter
) -> None:
    """Serve all batches; the trace goes to the folder."""
    with Trace(folder) as trace:
        serve(Watched(Batches(batches), shown), scheduler, backend, trace)
