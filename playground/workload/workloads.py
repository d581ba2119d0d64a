"""Workloads as a user names them: one frozen dataclass a kind, whose fields are the options `workload.<field>`.

`source(seed)` is what the loop takes; `draw(seed)` the same requests where arrivals do not depend on the system. All
randomness comes from the seed, in separate streams: lengths stay the same while a sweep changes the rate. A workload
with a `seed` of its own ignores the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf, isinf
from typing import Literal, Protocol

import numpy as np
from numpy.random import Generator

from playground.core import Request
from playground.workload import servegen, shaping
from playground.workload.arrivals import Arrivals, named, times
from playground.workload.errors import WorkloadError, check_at_least, check_choice, check_count, check_positive
from playground.workload.lengths import Fixed, Independent, Lengths
from playground.workload.readers import Dropped, ReadOptions, TraceFile
from playground.workload.rows import Row, to_requests
from playground.workload.sessions import SessionRows, draw_sessions
from playground.workload.shipped import POOLS, TRACES, find, slot
from playground.workload.source import ClosedLoop, OpenLoop, Sessions, Source
from playground.workload.synthetic import Prefixes, synthesize

ARRIVALS, LENGTHS, SESSIONS = range(3)
"""Random streams of one seed."""


class Workload(Protocol):
    """Anything that can be the load of a run; a user's own needs no more than this."""

    def source(self, seed: int) -> Source: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every workload can be held to. Lengths in tokens.

    Requests shorter than `min_prompt` or `min_output` are left out. `long` says what happens to those beyond
    `max_prompt`, `max_output` or `max_length` (both together): `drop` leaves them out, `clip` cuts them. `max_tokens`
    is what each request may generate at most; without it, exactly what will come, which tells a policy the future
    (see `rows.to_request`).
    """

    min_prompt: int = 1
    min_output: int = 1
    max_prompt: int | None = None
    max_output: int | None = None
    max_length: int | None = None
    long: Literal["drop", "clip"] = "drop"
    max_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_prompt", "min_output", "max_prompt", "max_output", "max_tokens"):
            check_count(f"workload.{name}", getattr(self, name))
        check_count("workload.max_length", self.max_length, least=2)
        check_count("workload.seed", self.seed, least=0)
        check_choice("workload.long", self.long, ("drop", "clip"))

    def rng(self, seed: int, stream: int) -> Generator:
        return np.random.default_rng([seed if self.seed is None else self.seed, stream])

    def limit(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows within the limits, or cut to them."""
        cut = shaping.clip_long if self.long == "clip" else shaping.drop_long
        most = (self.max_prompt or inf, self.max_output or inf, self.max_length or inf)
        return cut(shaping.drop_short(rows, self.min_prompt, self.min_output), *most)

    def to_requests(self, rows: Iterable[Row]) -> Iterator[Request]:
        return to_requests(rows, self.max_tokens, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Limits):
    """A workload from a file of requests. The options below `format` are those of `readers.ReadOptions`."""

    format: str | None = None
    hash_block: int | None = None
    time_unit: float | None = None
    output_length: int | None = None
    characters_per_token: float = 4.0

    @property
    def options(self) -> ReadOptions:
        return ReadOptions(self.hash_block, self.time_unit, self.output_length, self.characters_per_token)


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
    """A file of yours in one of the formats of `readers.FORMATS`; `playground` is what `saved.write` makes."""

    path: str

    def file(self) -> TraceFile:
        return find("workload.path", self.path, self.format, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Limits):
    """Requests made up from distributions; with `long=drop`, fewer than `requests` may remain."""

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
        rng = self.rng(seed, LENGTHS)
        return self.limit(synthesize(rng, self.requests, self.lengths, self.prefixes, self.tenants, self.priorities))


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
        return OpenLoop(list(self.draw(seed)))

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
        return ClosedLoop(list(self.to_requests(self.rows(seed))), self.concurrency, self.think)


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
