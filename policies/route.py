"""Which replica serves a new request?"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from playground.core import RequestView
from playground.policy import ClusterView, Load


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One after another, whatever their load."""

    _turn: count[int] = field(default_factory=count, init=False, repr=False, compare=False)

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        return next(self._turn) % len(view.loads)


@dataclass(frozen=True, slots=True)
class LeastOutstanding:
    """The replica with the fewest unfinished requests (join the shortest queue), the first among equals.

    `waiting` and `running` weigh the two kinds of request. Loads are as old as `queueing.report_interval`,
    `report_steps` and `report_delay` say; with `own` the router adds what it placed since they were taken, as vLLM does
    (its score: 4 waiting + running, every 0.1 s). Without, all that arrives between two reports goes to one replica.
    """

    waiting: float = 1.0
    running: float = 1.0
    own: bool = False
    _placed: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    """(when, where) of the placements that the loads do not know of."""

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        unknown = self._unknown(view) if self.own else {}

        def score(load: Load) -> tuple[float, int]:
            return self.waiting * (load.waiting + unknown.get(load.rank, 0)) + self.running * load.running, load.rank

        chosen = min(view.loads, key=score).rank
        if self.own:
            self._placed.append((view.now, chosen))
        return chosen

    def _unknown(self, view: ClusterView) -> Counter[int]:
        placed = self._placed
        while placed and (view.fresh or placed[0][0] < view.taken):
            placed.popleft()
        return Counter([rank for _, rank in placed])
