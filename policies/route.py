"""Which replica serves a new request?"""

from __future__ import annotations

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

    The load it sees is as stale as `cluster.report_interval` says.
    """

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        return min(view.loads, key=_outstanding).rank


def _outstanding(load: Load) -> tuple[int, int]:
    return load.waiting + load.running, load.rank
