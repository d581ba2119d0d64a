"""Replaying a file of requests: cut, limit, stretch or re-time, then send open loop. Knows no name of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import isinf

from playground.core import Request
from playground.workload import shaping
from playground.workload.arrivals import Arrivals, named
from playground.workload.errors import WorkloadError, check_at_least, check_count, check_positive
from playground.workload.fields import Dropped
from playground.workload.limits import ARRIVALS, Reading
from playground.workload.rows import Row
from playground.workload.source import OpenLoop, Source
from playground.workload.tracefile import TraceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Reading):
    """Requests of a file, sent open loop.

    In this order: `spread`, in seconds, undoes time stamps rounded to a grid (None: what the trace is known to need,
    0: off); `start` and `duration`, in seconds of the recording, cut a window; limits; `requests` cuts by count. Then
    arrivals are sped up by `speedup`, or stretched to a mean of `rate` requests per second, or, with `arrivals`,
    drawn anew at `rate`. `stream` holds one request at a time, for files beyond memory: they must be sorted by time.
    """

    rate: float | None = None
    arrivals: Arrivals | str | None = None
    speedup: float = 1.0
    start: float = 0.0
    duration: float | None = None
    requests: int | None = None
    spread: float | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        Reading.__post_init__(self)
        for name in ("rate", "speedup", "duration"):
            check_positive(f"workload.{name}", getattr(self, name))
        check_at_least("workload.start", self.start, 0)
        check_at_least("workload.spread", self.spread, 0)
        check_count("workload.requests", self.requests)
        if self.rate is not None and self.speedup != 1:
            raise WorkloadError(f"workload.speedup={self.speedup} does not go with workload.rate: set one of them")
        if self.arrivals is not None:
            self._check_drawn(named(self.arrivals))

    def source(self, seed: int) -> Source:
        if self.stream:
            return OpenLoop(self.draw(seed))
        return OpenLoop(list(self.draw(seed)))

    def draw(self, seed: int, dropped: Dropped | None = None) -> Iterator[Request]:
        """The requests; `dropped` counts the rows of the file that are none."""
        dropped = Counter() if dropped is None else dropped
        return self.to_requests(self._timed(self._rows(dropped), seed))

    def file(self) -> TraceFile:
        """The file to read. Raises a `WorkloadError` if there is none."""
        raise NotImplementedError

    def slot(self) -> float:
        """Seconds of the grid that time stamps were rounded to; 0 for none."""
        return self.spread or 0.0

    def in_order(self) -> bool:
        """Whether the rows are taken to be sorted by time, so that they need not be held to sort them."""
        return self.stream

    def _check_drawn(self, arrivals: Arrivals) -> None:
        if self.rate is None:
            raise WorkloadError(f"workload.rate=None must be a number: {arrivals} draws arrivals at a rate")

    def _rows(self, dropped: Dropped) -> Iterator[Row]:
        """The rows that are sent, with their recorded times."""
        rows = self.file().rows(dropped)
        rows = rows if self.in_order() else shaping.sort(rows)
        if self.slot():
            rows = shaping.spread(rows, self.slot())
        if self.start or self.duration:
            rows = shaping.window(rows, self.start, self.duration)
        return islice(self.limit(rows), self.requests)

    def _timed(self, rows: Iterator[Row], seed: int) -> Iterator[Row]:
        if self.rate is None:
            return shaping.stretch(rows, self.speedup)
        if self.arrivals is not None:
            return shaping.retime(rows, named(self.arrivals), self.rng(seed, ARRIVALS), self.rate)
        return shaping.stretch(rows, self.rate / self._recorded_rate())

    def _recorded_rate(self) -> float:
        # Read once more, not held in memory: a streamed file may be longer than that.
        if isinf(recorded := shaping.mean_rate(self._rows(Counter()))):
            raise WorkloadError(
                f"workload.rate={self.rate} cannot be reached by stretching: all arrive at one time; "
                "set workload.arrivals=poisson, or a longer workload.duration"
            )
        return recorded
