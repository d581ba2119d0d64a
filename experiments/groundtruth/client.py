"""The client and the front end of a measured closed loop: what lies between a user and an engine's scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from playground.core import Arrive, Request
from playground.workload.source import Event


class ThroughFrontEnd:
    """`users` clients, each sending its next request when its last one ended, all through one front end.

    The front end (HTTP, tokenizer, one Python thread) takes `service` seconds for each request, one after another:
    requests that are sent at once reach the scheduler one by one. What a request waited there is `waited`.
    """

    def __init__(self, requests: Iterator[Request], users: int, service: float = 0.0) -> None:
        self.total: int | None = None
        self.waited: dict[int, float] = {}
        self._requests = requests
        self._service = service
        self._free = 0.0
        self._due: list[tuple[float, int, Request]] = []
        for _ in range(users):
            self._send(0.0)

    def due(self) -> float:
        return self._due[0][0] if self._due else inf

    def take(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self._due and self._due[0][0] <= now:
            events.append(Arrive(heappop(self._due)[2]))
        return events

    def finished(self, request_id: int, now: float) -> None:
        self._send(now)

    def _send(self, at: float) -> None:
        if (request := next(self._requests, None)) is None:
            return
        self._free = max(self._free, at) + self._service
        self.waited[request.id] = self._free - at
        heappush(self._due, (self._free, request.id, replace(request, arrival=self._free)))
