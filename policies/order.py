"""Who is next among the waiting?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist
from typing import Protocol

from playground.core import RequestView
from playground.draft import Draft
from playground.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served; preempted sequences come before all others.

    Stops at the first that is not admitted: nobody overtakes (head-of-line blocking included).
    Source: vLLM (SOSP'23) and every engine since.
    """

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        served = None
        while (head := next(iter(draft.waiting), None)) is not None and head is not served:
            yield head
            served = head


class Predictor(Protocol):
    """How many tokens will the answer have? Sees what policies may know of a request; the same answer every time."""

    def __call__(self, request: RequestView) -> float: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """What the client allows (`max_tokens`), times `bias`, times exp(`sigma` z) with z normal, drawn once a request.

    A trace that says how long answers were allows just that (unless its workload is capped): then sigma 0 and bias 1
    are the oracle. Median error of a predictor with sigma: a factor of exp(0.67 sigma).
    """

    sigma: float = 0.0
    bias: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sigma >= 0:
            raise ValueError(f"policy.order.predictor.sigma={self.sigma} must be 0 (no error) or more")
        if not self.bias > 0:
            raise ValueError(f"policy.order.predictor.bias={self.bias} must be more than 0 (1: none)")

    def __call__(self, request: RequestView) -> float:
        exact = request.max_tokens * self.bias
        return exact * exp(self.sigma * _normal(self.seed, request.id)) if self.sigma else exact


@dataclass(frozen=True, slots=True)
class Sjf:
    """Shortest predicted job first: fewest tokens left to sample, by a predictor; ties by arrival.

    `predictor`: what the client allows, wrong by its `sigma`, `bias` and `seed` (log-normal), or one of your own. A
    preempted sequence has fewer left than it had, and no other privilege. `ageing`: tokens of advantage for each second
    waited; with 0 a long request starves for as long as shorter ones keep coming. Stops at the first that is not
    admitted. Source: SSJF (arXiv 2404.08509), Learning-to-Rank (NeurIPS'24), from their abstracts; nobody who runs is
    preempted, as in SRTF.
    """

    predictor: Predictor = LogNormal()
    ageing: float = 0.0

    def __post_init__(self) -> None:
        if not self.ageing >= 0:
            raise ValueError(f"policy.order.ageing={self.ageing} must be 0 (none) or more tokens a second")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return iter(sorted(draft.waiting, key=self._key))

    def _key(self, sequence: Sequence) -> tuple[float, float, int]:
        # All have aged for as long as the clock runs since: what tells them apart is when they came.
        request = sequence.request
        left = max(1.0, self.predictor(request) - sequence.promised)
        return left + self.ageing * request.arrival, request.arrival, sequence.id


@lru_cache(maxsize=1 << 16)
def _normal(seed: int, request: int) -> float:
    """A standard normal number that belongs to the request: splitmix64's output function, inverted."""
    word = (seed * 0x632BE59BD9B4E019 + (request + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return NormalDist().inv_cdf(((word ^ word >> 31) + 0.5) / (_WORD + 1))


_WORD = (1 << 64) - 1
