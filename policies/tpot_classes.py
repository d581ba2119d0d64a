"""Replicas divided by how fast the answers they give have to be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from playground.core import RequestView
from playground.policy import ClusterView, Load
from policies.dispatched import Dispatched, Turns
from policies.route import outstanding


@dataclass(frozen=True, slots=True)
class TpotClasses:
    """The most loaded replica of the request's TPOT class that would still keep it; else one of a tighter class.

    `classes`: objectives in seconds a token, tightest first; replicas are divided evenly among them, in order, and a
    request belongs to the last class that is not looser than its `slo.tpot` (one without, to the last). A replica keeps
    a class while `step` + `per_decode` x (its requests + 1) does not exceed it. Packing full ones first leaves others
    empty for bursts. Where nobody of its own or a tighter class can keep it, the least loaded of its own takes it.
    A looser request in a tighter class must be served at that pace, too. Of equals, the one chosen longest ago. Loads
    are as old as `queueing.report_*` say; with `own` the router adds what it placed since, or else a burst would all be
    packed into a replica that looks as if it could keep them. Equal requests do not get equal shares of the replicas:
    of the conformance kit's properties `ties` and `stale_loads`, which ask for that, it fails both on purpose.
    Source: PolyServe, arXiv 2507.17769 (2025), from its abstract: binning by TPOT, the most loaded that still meets the
    objective, looser may share tighter; `own` is ours. Not taken over: bins that grow and shrink, wait-time awareness.
    """

    classes: tuple[float, ...] = (0.02, 0.05, 0.1)
    step: float = 0.005
    per_decode: float = 1.1e-4
    own: bool = True
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))  # a list where it was read from a file
        ordered = list(self.classes)
        if not ordered or ordered[0] <= 0 or any(a >= b for a, b in pairwise(ordered)):
            raise ValueError(f"policy.route.classes={ordered} must be rising objectives above 0 seconds a token")
        for name in ("step", "per_decode"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"policy.route.{name}={value} must be 0 or more seconds")

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        loads = self._dispatched.loads(view)
        chosen = self._choose(self.class_of(request.slo.tpot), loads)
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen

    def _choose(self, own: int, loads: Sequence[Load]) -> int:
        for place in range(own, -1, -1):  # its own, then tighter ones
            able = [load for load in self.replicas(loads, place) if self._keeps(load, self.classes[place])]
            if able:
                return self._turns.least(able, lambda load: -outstanding(load))
        return self._turns.least(self.replicas(loads, own) or loads, outstanding)

    def class_of(self, tpot: float) -> int:
        """Which class such an objective belongs to; one tighter than all, to the first."""
        return max(bisect_right(self.classes, tpot) - 1, 0)

    def replicas(self, loads: Sequence[Load], place: int) -> Sequence[Load]:
        """Those of a class; none where there are more classes than replicas."""
        count, many = len(self.classes), len(loads)
        return loads[place * many // count : (place + 1) * many // count]

    def _keeps(self, load: Load, tpot: float) -> bool:
        return self.step + self.per_decode * (outstanding(load) + 1) <= tpot
