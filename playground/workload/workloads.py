"""Workloads as a user names them: one frozen dataclass a kind, whose fields are the options `workload.<field>`.

`source(seed)` is what the loop takes; `draw(seed)` the same requests where arrivals do not depend on the system. All
randomness comes from the seed, in separate streams: lengths stay the same while a sweep changes the rate. A workload
with a `seed` of its own ignores the run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, Protocol

from numpy.random import Generator

from playground.core import Request
from playground.workload import servegen, shaping
from playground.workload.arrivals import Arrivals, named, times
from playground.workload.errors import WorkloadError, check_at_least, check_choice, check_count, check_positive
from playground.workload.lengths import Fixed, Independent, Lengths
from playground.workload.limits import ARRIVALS, LENGTHS, SESSIONS, Limits, Reading
from playground.workload.replay import Replay
from playground.workload.rows import Row
from playground.workload.sessions import SessionRows, draw_sessions
from playground.workload.shipped import POOLS, TRACES, find, slot
from playground.workload.source import ClosedLoop, OpenLoop, Sessions, Source
from playground.workload.synthetic import Prefixes, private_ids, synthesize
from playground.workload.tracefile import TraceFile

FRUITLESS = 100
"""Draws in a row of which the limits left nothing, after which they are taken to be impossible."""


class Workload(Protocol):
    """Anything that can be the load of a run; a user's own needs no more than this."""

    def source(self, seed: int) -> Source: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload(Replay):
    """A recorded trace: `trace` is the name of a shipped one (`shipped.TRACES`), or a path with its `format`."""

    trace: str

    def file(self) -> TraceFile:
        return find("workload.trace", self.trace, self.format, self.options)

    def slot(self) -> float:
        return slot(self.trace) if self.spread is None else self.spread

    def in_order(self) -> bool:
        return self.stream or self.trace in TRACES


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWorkload(Replay):
    """A file of yours in one of the formats of `tracefile.FORMATS`; `playground` is what `saved.write` makes."""

    path: str

    def file(self) -> TraceFile:
        return find("workload.path", self.path, self.format, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Limits):
    """Requests made up from distributions: `requests` of them within the limits."""

    requests: int = 1000
    lengths: Lengths = field(default_factory=lambda: Independent(Fixed(1024), Fixed(128)))
    prefixes: Prefixes | None = None
    tenants: int = 1
    priorities: int = 1

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        for name in ("requests", "tenants", "priorities"):
            check_count(f"workload.{name}", getattr(self, name))
        self.lengths.check("workload.lengths")

    def rows(self, seed: int) -> Iterator[Row]:
        """The rows, without arrivals."""
        return islice(self._endless(seed), self.requests)

    def _endless(self, seed: int) -> Iterator[Row]:
        """Drawn again for those that the limits leave out."""
        rng, private = self.rng(seed, LENGTHS), private_ids(self.prefixes)
        kinds = self.lengths, self.prefixes, self.tenants, self.priorities
        fruitless = 0
        while fruitless < FRUITLESS:
            fruitless += 1
            for row in self.limit(synthesize(rng, self.requests, *kinds, private)):
                fruitless = 0
                yield row
        raise WorkloadError(
            f"workload.max_length={self.max_length} and the other limits leave none of "
            f"{FRUITLESS * self.requests} drawn requests: widen them, or take workload.long=clip"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload(Made):
    """Open loop at `rate` requests per second; an infinite rate (`inf`) sends all at once. `duration` (s) cuts."""

    rate: float = 1.0
    arrivals: Arrivals | str = "poisson"
    duration: float | None = None

    def __post_init__(self) -> None:
        Made.__post_init__(self)
        if self.rate is None:
            raise WorkloadError("workload.rate=None must be greater than 0; inf sends all requests at once")
        check_positive("workload.rate", self.rate)
        check_positive("workload.duration", self.duration)
        named(self.arrivals)

    def source(self, seed: int) -> Source:
        """Drawn while the run goes on: how many there are is known beforehand only where no `duration` cuts them."""
        return OpenLoop(self.draw(seed), total=self.requests if self.duration is None else None)

    def draw(self, seed: int) -> Iterator[Request]:
        timed = shaping.retime(self.rows(seed), named(self.arrivals), self.rng(seed, ARRIVALS), self.rate)
        return self.to_requests(shaping.window(timed, 0.0, self.duration))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopWorkload(Made):
    """`concurrency` clients, each sending its next request `think` seconds after its last one ended."""

    concurrency: int = 8
    think: float = 0.0

    def __post_init__(self) -> None:
        Made.__post_init__(self)
        check_count("workload.concurrency", self.concurrency)
        check_at_least("workload.think", self.think, 0)

    def source(self, seed: int) -> Source:
        return ClosedLoop(self.to_requests(self.rows(seed)), self.concurrency, self.think, self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionWorkload(Reading):
    """Sessions of a trace (`trace`: a shipped name, or a path with its `format`), started anew at `rate` per second.

    A session's next call comes a tool time after its last one ended: as recorded times `tool_scale`, or, with
    `tool_time`, exponential with that mean in seconds. Recorded gaps hold the latency of the recording's own model
    too, so they are upper bounds. `sessions` is how many are started (None: each once); beyond the trace's number
    they are copies which share with each other what sessions of the trace shared, and nothing more.
    """

    trace: str
    rate: float = 0.1
    arrivals: Arrivals | str = "poisson"
    sessions: int | None = None
    tool_time: float | None = None
    tool_scale: float = 1.0

    def __post_init__(self) -> None:
        Reading.__post_init__(self)
        check_positive("workload.rate", self.rate)
        check_count("workload.sessions", self.sessions)
        check_at_least("workload.tool_time", self.tool_time, 0)
        check_at_least("workload.tool_scale", self.tool_scale, 0)
        named(self.arrivals)

    def source(self, seed: int) -> Source:
        recorded = SessionRows.group(self.limit(self._file().rows()))
        rng = self.rng(seed, SESSIONS)
        chosen = recorded.choose(rng, self.sessions)
        starts = times(named(self.arrivals), self.rng(seed, ARRIVALS), self.rate)
        played = [replace(calls, gaps=self._tool_times(calls.gaps, rng)) for calls in chosen]
        return Sessions(draw_sessions(played, starts, self.to_requests))

    def _file(self) -> TraceFile:
        return find("workload.trace", self.trace, self.format, self.options)

    def _tool_times(self, gaps: tuple[float, ...], rng: Generator) -> tuple[float, ...]:
        if self.tool_time is None:
            return tuple(gap * self.tool_scale for gap in gaps)
        return tuple(rng.exponential(self.tool_time, len(gaps)).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeGenWorkload(Limits):
    """Clients of a production service over `duration` seconds from second `start` of the day (see `servegen`).

    `rate` scales all clients to a mean of so many requests per second; None takes the recorded load. `missing`: the
    clients of m-large whose lengths were not published (a third of its requests) get another client's (`pool`) or are
    left out (`drop`). The tenant of a request is its client.
    """

    pool: str = "deepseek-r1"
    rate: float | None = None
    start: float = 43_200.0
    duration: float = 600.0
    requests: int | None = None
    missing: Literal["pool", "drop"] = "pool"

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        check_choice("workload.pool", self.pool, POOLS)
        check_choice("workload.missing", self.missing, ("pool", "drop"))
        check_positive("workload.rate", self.rate)
        check_at_least("workload.start", self.start, 0)
        check_positive("workload.duration", self.duration)
        check_count("workload.requests", self.requests)
        if self.start + self.duration > servegen.DAY:
            raise WorkloadError(
                f"workload.start={self.start} plus workload.duration={self.duration} must not exceed a day, 86400 s"
            )

    def source(self, seed: int) -> Source:
        return OpenLoop(list(self.draw(seed)))

    def draw(self, seed: int) -> Iterator[Request]:
        pool = servegen.read_pool(self.pool)
        pool = pool.with_sizes() if self.missing == "drop" else pool
        rows = pool.draw(self.rng(seed, LENGTHS), self.start, self.duration, self.rate)
        return self.to_requests(islice(self.limit(rows), self.requests))
