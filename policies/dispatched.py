"""What a router remembers of its own choices: those that stale loads do not show, and whose turn it is among equals."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from playground.core import RequestView
from playground.policy import ClusterView, Load


class Dispatched:
    """Requests that the loads a router sees do not know of yet, for they were placed after the loads were taken.

    Adding them to the loads is what vLLM calls its local increment and SGLang its optimistic or speculative update.
    """

    __slots__ = ("_recent", "_requests", "_tokens")

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, int]] = deque()
        """When, where, and tokens of the prompt; oldest first."""
        self._requests: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        """Both of `_recent`, by rank."""

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, view: ClusterView, request: RequestView, rank: int) -> None:
        """Remember a placement."""
        self._recent.append((view.now, rank, request.prompt_length))
        self._requests[rank] += 1
        self._tokens[rank] += request.prompt_length

    def loads(self, view: ClusterView) -> Sequence[Load]:
        """The loads with every request that they do not know of counted as waiting."""
        recent = self._recent
        while recent and (view.fresh or recent[0][0] < view.taken):
            _, rank, prompt = recent.popleft()
            self._requests[rank] -= 1
            self._tokens[rank] -= prompt
        if not recent:
            return view.loads
        requests, tokens = self._requests, self._tokens
        return [
            load._replace(
                waiting=load.waiting + requests[load.rank], waiting_tokens=load.waiting_tokens + tokens[load.rank]
            )
            for load in view.loads
        ]


class Turns:
    """Who goes among equals: whoever was chosen longest ago.

    The first in a fixed order would get every tie: so vLLM gave its rank 0 six requests of ten (PR #47420, which has
    the order begin one further on after every decision). This one stays fair where only some are ever equal, too.
    """

    __slots__ = ("_chosen", "_count")

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}
        """By rank: at which choice it was the last time."""
        self._count = 0

    def least(self, loads: Sequence[Load], score: Callable[[Load], Any]) -> int:
        """The rank with the lowest score, which is chosen by it."""
        chosen = min(loads, key=lambda load: (score(load), self._chosen.get(load.rank, 0), load.rank)).rank
        self.choose(chosen)
        return chosen

    def choose(self, rank: int) -> None:
        """Somebody chose it for another reason."""
        self._count += 1
        self._chosen[rank] = self._count
