"""Where requests come from while a run goes on: open loop, closed loop, sessions.

A source is the client side of the one loop. It knows when the next event is due and hears of every request that
ended. It reads no clock: the loop tells it what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from playground.core import Abort, Arrive, Request
from playground.workload.errors import WorkloadError, check_at_least, check_count

Event = Arrive | Abort


class Source(Protocol):
    """What the loop asks of a workload."""

    @property
    def total(self) -> int | None:
        """How many requests will come in all; None if nobody knows yet."""
        ...

    def due(self) -> float:
        """When the next event that is known now is due, in seconds; `inf` if none is known."""
        ...

    def take(self, now: float) -> list[Event]:
        """All events due by `now`, in order of time, then of id; each is handed out once."""
        ...

    def finished(self, request_id: int, now: float) -> None:
        """The request ended (finished, rejected or aborted): the client may answer with later arrivals."""
        ...


class OpenLoop:
    """Requests that arrive when they arrive, whatever the system does.

    `requests` must be sorted by (arrival, id) and may be an iterator: only one request is held at a time, so a trace
    of any length can be streamed. `aborts` are (seconds, request id): the client gives up at that time, unless the
    request ended before. An abort at the very time of its request's arrival comes after it.
    """

    def __init__(
        self, requests: Iterable[Request], aborts: Iterable[tuple[float, int]] = (), total: int | None = None
    ) -> None:
        self.total = len(requests) if isinstance(requests, Sized) else total
        self._requests = _ordered(requests)
        self._next = next(self._requests, None)
        self._aborts = deque(sorted(aborts))
        self._abortable = {request for _, request in self._aborts}

    def due(self) -> float:
        arrival = self._next.arrival if self._next else inf
        return min(arrival, self._aborts[0][0] if self._aborts else inf)

    def take(self, now: float) -> list[Event]:
        events: list[Event] = []
        while (due := self.due()) <= now and due < inf:
            events.append(self._pop(due))
        return events

    def finished(self, request_id: int, now: float) -> None:
        self._abortable.discard(request_id)
        self._skip_ended()

    def _pop(self, due: float) -> Event:
        if self._next is None or self._next.arrival > due:
            abort = Abort(self._aborts.popleft()[1])
            self.finished(abort.request, due)
            return abort
        request, self._next = self._next, next(self._requests, None)
        return Arrive(request)

    def _skip_ended(self) -> None:
        """Keep the head one that still means something: `due` looks no further."""
        while self._aborts and self._aborts[0][1] not in self._abortable:
            self._aborts.popleft()


class ClosedLoop:
    """So many clients, each sending its next request `think` seconds after its last one ended.

    `concurrency` requests arrive at time 0; the arrivals that `requests` come with are replaced. Never are more than
    `concurrency` requests in the system. `requests` may be an iterator.
    """

    def __init__(
        self, requests: Iterable[Request], concurrency: int, think: float = 0.0, total: int | None = None
    ) -> None:
        check_count("workload.concurrency", concurrency)
        check_at_least("workload.think", think, 0)
        self.total = len(requests) if isinstance(requests, Sized) else total
        self._requests = iter(requests)
        self._think = think
        self._due: list[tuple[float, int, Request]] = []
        self._outstanding: set[int] = set()
        for _ in range(concurrency):
            self._send(0.0)

    def due(self) -> float:
        return self._due[0][0] if self._due else inf

    def take(self, now: float) -> list[Event]:
        return [Arrive(request) for request in _pop_due(self._due, now)]

    def finished(self, request_id: int, now: float) -> None:
        _end(self._outstanding, request_id)
        self._send(now + self._think)

    def _send(self, at: float) -> None:
        if (request := next(self._requests, None)) is not None:
            self._outstanding.add(request.id)
            heappush(self._due, (at, request.id, replace(request, arrival=at)))


@dataclass(frozen=True, slots=True)
class Session:
    """Calls that one client makes one after another.

    `start` is when the first call arrives, in seconds; `gaps[i]` is the client's own time (a tool, a person reading)
    between the end of call i and the arrival of call i+1. Arrivals inside `calls` are ignored.
    """

    start: float
    calls: tuple[Request, ...]
    gaps: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.gaps) != len(self.calls) - 1:
            raise WorkloadError(f"session: {len(self.gaps)} gaps do not fit between {len(self.calls)} calls")
        if self.start < 0 or min(self.gaps, default=0.0) < 0:
            raise WorkloadError(f"session of request {self.calls[0].id}: its start and gaps must be at least 0")


class Sessions:
    """Sessions whose next call waits for the end of the one before: load answers to latency, as agents' does.

    A call that is rejected or aborted counts as ended: the session goes on.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.total = sum(len(session.calls) for session in sessions)
        self._following: dict[int, tuple[float, Request]] = {}
        self._outstanding: set[int] = set()
        self._due: list[tuple[float, int, Request]] = []
        for session in sessions:
            self._enter(session)
        heapify(self._due)

    def due(self) -> float:
        return self._due[0][0] if self._due else inf

    def take(self, now: float) -> list[Event]:
        return [Arrive(request) for request in _pop_due(self._due, now)]

    def finished(self, request_id: int, now: float) -> None:
        _end(self._outstanding, request_id)
        if request_id in self._following:
            gap, request = self._following.pop(request_id)
            heappush(self._due, (now + gap, request.id, replace(request, arrival=now + gap)))

    def _enter(self, session: Session) -> None:
        first, *rest = session.calls
        self._due.append((session.start, first.id, replace(first, arrival=session.start)))
        for before, gap, call in zip(session.calls, session.gaps, rest, strict=False):
            self._following[before.id] = (gap, call)
        ids = {call.id for call in session.calls}
        if len(ids) < len(session.calls) or ids & self._outstanding:
            raise WorkloadError(f"session of request {first.id}: a request id occurs twice")
        self._outstanding |= ids


def _ordered(requests: Iterable[Request]) -> Iterator[Request]:
    """The requests as they are, or an error at the first that comes out of order."""
    last = (0.0, -1)
    for request in requests:
        # "not >" and not "<=": an arrival that is not a number must not slip through.
        if not (request.arrival, request.id) > last:
            raise WorkloadError(
                f"request {request.id}: arrival={request.arrival} comes after request {last[1]} at {last[0]}; "
                "an open loop needs requests sorted by arrival, then id"
            )
        last = (request.arrival, request.id)
        yield request


def _pop_due(heap: list[tuple[float, int, Request]], now: float) -> Iterator[Request]:
    while heap and heap[0][0] <= now:
        yield heappop(heap)[2]


def _end(outstanding: set[int], request_id: int) -> None:
    """Hearing twice of one request would set off two arrivals: a bug in the caller, so not passed over."""
    if request_id not in outstanding:
        raise WorkloadError(f"request {request_id} ended, but it is unknown or had ended before")
    outstanding.remove(request_id)
