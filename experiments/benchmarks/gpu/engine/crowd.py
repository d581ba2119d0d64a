"""A closed loop at a steady state: so many requests always in flight, at every stage of their answers."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf, nan

from experiments.benchmarks.gpu.engine.serving import Recorder, serve_all
from playground.backend import Backend
from playground.core import Abort, Arrive, Done, Request, Step
from policies.composed import Composed

Event = Arrive | Abort


class Crowd:
    """The source: who ends is followed by the next at once; from `end` on nobody is, and who is left goes away."""

    def __init__(self, requests: Iterator[Request], size: int, began: float) -> None:
        self.total = None
        self.end = inf
        self._requests = requests
        self._waiting = [replace(request, arrival=began) for request in islice(requests, size)]
        self._inside: set[int] = set()

    def due(self) -> float:
        if self._waiting:
            return self._waiting[0].arrival
        return self.end if self._inside else inf

    def take(self, now: float) -> list[Event]:
        come, self._waiting = self._waiting, []
        if now < self.end:
            self._inside.update(request.id for request in come)
            return [Arrive(request) for request in come]
        left, self._inside = sorted(self._inside), set()
        return [Abort(id) for id in left]

    def finished(self, request_id: int, now: float) -> None:
        if request_id in self._inside:
            self._inside.remove(request_id)
            self._waiting.append(replace(next(self._requests), arrival=now))


class Watch(Recorder):
    """Opens a window of so many seconds when each of the first requests has its first token."""

    def __init__(self, crowd: Crowd, first: set[int], seconds: float) -> None:
        super().__init__()
        self.opened = inf
        self.arrivals: dict[int, float] = {}
        self._crowd, self._first, self._seconds = crowd, set(first), seconds

    def arrived(self, request: Request) -> None:
        self.arrivals[request.id] = request.arrival

    def committed(self, done: Done, step: Step) -> None:
        super().committed(done, step)
        if self._first:
            self._first.difference_update(done.tokens)
            if not self._first:
                self.opened, self._crowd.end = done.finished, done.finished + self._seconds


@dataclass
class Steady:
    """What happened within the window. Times in seconds."""

    seconds: float
    gaps: list[float] = field(default_factory=list)
    """Between two tokens of a request, in order of time."""
    waits: list[float] = field(default_factory=list)
    """From arrival to first token."""
    ended: int = 0
    steps: int = 0
    computed: int = 0
    """Tokens, of prompts and answers."""

    @property
    def tpot(self) -> float:
        """As a steady state's mean over requests would be: each has the same number of gaps."""
        return statistics.mean(self.gaps) if self.gaps else nan

    @property
    def halves(self) -> tuple[float, float]:
        """The same of either half: alike, if the state is steady."""
        middle = len(self.gaps) // 2
        return statistics.mean(self.gaps[:middle]), statistics.mean(self.gaps[middle:])

    @property
    def computed_of_prompt(self) -> float:
        """Tokens of a prompt that were computed, in the mean."""
        return (self.computed - len(self.gaps)) / max(len(self.waits), 1)

    @property
    def tokens_per_second(self) -> float:
        return (len(self.gaps) + len(self.waits)) / self.seconds


def in_flight(
    backend: Backend, make: Callable[[int, int], Request], size: int, output: int, rules: Composed, seconds: float,
    prefix_cache: bool = False,
) -> Steady:  # fmt: skip
    """`make(id, output)` is a request. The first ones' answers have every length, lest all end at the same time."""

    requests = (make(id, output if id >= size else max(output * (id + 1) // size, 1)) for id in count())
    gc.collect()
    began = backend.now()
    crowd = Crowd(requests, size, began)
    watch = Watch(crowd, set(range(size)), seconds)
    serve_all(crowd, backend, watch, rules, prefix_cache)
    return _within(watch, seconds)


def _within(watch: Watch, seconds: float) -> Steady:
    found, last = Steady(seconds), dict[int, float]()
    for step, done in watch.done:
        inside = watch.opened < done.finished <= watch.opened + seconds
        for id in done.tokens:
            if inside and id in last:
                found.gaps.append(done.finished - last[id])
            elif inside:
                found.waits.append(done.finished - watch.arrivals[id])
            last[id] = done.finished
        if inside:
            found.steps += 1
            found.computed += sum(part.length for part in step.slices)
            found.ended += len(done.ended)
    return found
