"""The client and the front end of a measured closed loop: what lies between a user and an engine's scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from playground.core import Arrive, Request
from playground.workload.source import Event


class ThroughFrontEnd:
    """`users` clients, each sending its next request when its last one ended, `latency` seconds away.

    The time from one user's last token to the same user's next prompt at the scheduler (detokenizer, HTTP both ways,
    tokenizer) is what the requests of users who ended at about the same time gather in, and then they queue behind one
    another. Clients count it, as part of the time to the first token: `waited`.
    """

    def __init__(self, requests: Iterator[Request], users: int, latency: float = 0.0) -> None:
        self.total: int | None = None
        self.waited: dict[int, float] = {}
        self._requests = requests
        self._latency = latency
        self._due: deque[Request] = deque()
        for _ in range(users):
            self._send(0.0)

    def due(self) -> float:
        return self._due[0].arrival if self._due else inf

    def take(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self._due and self._due[0].arrival <= now:
            events.append(Arrive(self._due.popleft()))
        return events

    def finished(self, request_id: int, now: float) -> None:
        self._send(now)

    def _send(self, at: float) -> None:
        """What is sent later arrives later: all take as long."""
        if (request := next(self._requests, None)) is not None:
            self.waited[request.id] = self._latency
            self._due.append(replace(request, arrival=at + self._latency))
