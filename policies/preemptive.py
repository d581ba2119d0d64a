"""Orders for which running sequences give way to waiting ones.

How they do (their KV is dropped, or swapped to the host) is for `policy.victims.how` to say; whoever lost its KV often
is left alone by younger ones (`policies.composed.PATIENCE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence
from policies.order import Key, by_key, check_ageing
from policies.predictors import LogNormal, Predictor
from policies.ranking import Ranking

REMEMBERED = 1 << 16
"""Predictions that are kept; more are made anew."""


@dataclass(frozen=True, slots=True)
class Srtf:
    """Shortest remaining time first: as `sjf`, and whoever runs with more left gives way, the one with most first.

    What is left is what `predictor` says, less what is promised; who has outlived its prediction has next to nothing
    left, and keeps its seat. It gives way only to one with more than `hysteresis` tokens less, for its KV has its
    price: with 0 a short one drives out another that is hardly longer. `ageing`: as in `sjf`, tokens of advantage for
    each second since arrival, of those that run as well. Recomputing may cost more than it gains: of 300
    requests at 30/s to 16 seats (Llama-3.1-8B on an H100, simulated, true lengths) 77 give way, and the mean latency is
    2.3 s, of `sjf` 2.1 s, of `fcfs` 3.5 s.
    Source: Schrage, Operations Research 16(3), 1968; with predictions TRAIL (arXiv 2410.01035), from its abstract.
    """

    predictor: Predictor = field(default_factory=LogNormal)
    hysteresis: float = 64.0
    ageing: float = 0.0
    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)
    _predicted: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of each sequence, and its age: what tells two apart that age alike is when they came."""

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < inf:
            raise ValueError(f"policy.order.hysteresis={self.hysteresis} must be 0 (none) or more tokens")
        check_ageing(self.ageing, "tokens")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        if len(self._predicted) >= REMEMBERED:
            self._predicted.clear()
        left = self._aged(sequence) - sequence.promised
        return (max(1.0 + self.ageing * sequence.request.arrival, left),)

    def _aged(self, sequence: Sequence) -> float:
        request = sequence.request
        aged = self._predicted[sequence.id] = self.predictor(request) + self.ageing * request.arrival
        return aged

    def gives_way(self, draft: Draft, heir: Sequence) -> list[Sequence]:
        known = self._predicted
        for sequence in draft.running:
            if sequence.id not in known:
                self._aged(sequence)
        (least,) = self.key(heir)
        least += self.hysteresis
        # Most looks find nobody, and every step comes here: no call for each that runs.
        if max([known[one.id] - one.promised for one in draft.running], default=0.0) <= least:
            return []
        rivals = [one for one in draft.running if known[one.id] - one.promised > least]
        return sorted(rivals, key=lambda one: (one.promised - known[one.id], -one.request.arrival, -one.id))


@dataclass(frozen=True, slots=True)
class PreemptivePriority:
    """By the requests' priority, and those that run give way to one that is more urgent by more than `threshold`.

    The most urgent first, ties by arrival; the highest number is the most urgent unless `lowest_first`. Who gives way:
    the least urgent first, the youngest among them. With a threshold of 0 any difference will do.
    Source: SGLang 00550cd, `enable_priority_scheduling` (`_sort_by_priority_and_fcfs`, `preempt_to_schedule`), where
    nobody gives way, too, unless that makes room; threshold 10 and highest first are its server's defaults.
    """

    threshold: int = 10
    lowest_first: bool = False
    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"policy.order.threshold={self.threshold} must be 0 (any difference) or more")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        priority = sequence.request.priority
        return (priority if self.lowest_first else -priority,)

    def gives_way(self, draft: Draft, heir: Sequence) -> list[Sequence]:
        sign = 1 if self.lowest_first else -1
        least = sign * heir.request.priority + self.threshold
        rivals = [one for one in draft.running if sign * one.request.priority > least]
        return sorted(rivals, key=lambda one: (-sign * one.request.priority, -one.request.arrival, -one.id))
