"""How many tokens will an answer have? Predictors for orders that want to know, and their errors as parameters.

All say the same of a request every time they are asked: errors are drawn by its id and a seed. They err over another
predictor (`of`): over what the client allows, or over the truth, which only `OracleLength` is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf
from statistics import NormalDist
from typing import Protocol

from playground.core import RequestView
from playground.oracle import Oracle


class Predictor(Protocol):
    """How many tokens will the answer have? Sees what policies may know of a request; the same answer every time."""

    def __call__(self, request: RequestView) -> float: ...


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """What the client allows (`max_tokens`)."""

    def __call__(self, request: RequestView) -> float:
        return request.max_tokens


@dataclass(frozen=True, slots=True)
class OracleLength(Oracle):
    """The true output length: a bound of what prediction can give, and no policy that could be deployed.

    Needs a workload that knows how long answers will be. With an engine that may end an answer earlier or later (at
    its end token), it is the length of the trace.
    """

    def __call__(self, request: RequestView) -> float:
        return self.length(request.id)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Wrong by a factor: what `of` says, times `bias`, times exp(`sigma` z) with z normal, by request and `seed`.

    Median error of a predictor with sigma: a factor of exp(0.67 sigma). A trace that does not say how long answers were
    allowed to be has them allowed their true length (unless its workload is capped): then `MaxTokens` is the oracle.
    """

    sigma: float = 0.0
    bias: float = 1.0
    seed: int = 0
    of: Predictor = MaxTokens()

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < inf:
            raise ValueError(f"policy.order.predictor.sigma={self.sigma} must be 0 (no error) or more")
        if not 0 < self.bias < inf:
            raise ValueError(f"policy.order.predictor.bias={self.bias} must be more than 0 (1: none)")

    def __call__(self, request: RequestView) -> float:
        exact = self.of(request) * self.bias
        return exact * exp(self.sigma * _normal(self.seed, request.id)) if self.sigma else exact


@dataclass(frozen=True, slots=True)
class RankNoise:
    """Wrong in rank: of `share` of all requests it says nothing but noise, log-uniform in [1, `longest`] tokens.

    `seed` says of which, and what. What `of` says of the others is left alone. Where true lengths are log-uniform, too,
    Kendall's tau between truth and prediction is (1 - share)² + 2/3 share (1 - share): two requests of which one is
    noise agree two times in three, for a long one is likely to be longer than anything. Rank is what orders by
    predicted length depend on (Learning-to-Rank, arXiv 2408.15792, from its abstract: it is reported as tau).
    """

    share: float = 0.2
    longest: int = 2048
    seed: int = 0
    of: Predictor = MaxTokens()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"policy.order.predictor.share={self.share} must lie in [0, 1]")
        if self.longest < 1:
            raise ValueError(f"policy.order.predictor.longest={self.longest} must be at least 1 token")

    def __call__(self, request: RequestView) -> float:
        if _uniform(2 * self.seed, request.id) >= self.share:
            return self.of(request)
        return float(self.longest ** _uniform(2 * self.seed + 1, request.id))


@dataclass(frozen=True, slots=True)
class Saturating:
    """Systematically short of long answers: what `of` says, but never more than `ceiling` tokens.

    What a model that was trained on shorter answers does. All that are longer are equal to it: an order falls back to
    arrival among them. (An error by the same factor everywhere is `LogNormal.bias`, and changes no order by length
    until tokens come off it.)
    """

    ceiling: float = 512.0
    of: Predictor = MaxTokens()

    def __post_init__(self) -> None:
        if not self.ceiling >= 1:
            raise ValueError(f"policy.order.predictor.ceiling={self.ceiling} must be at least 1 token")

    def __call__(self, request: RequestView) -> float:
        return min(self.ceiling, self.of(request))


@lru_cache(maxsize=1 << 16)
def _normal(seed: int, request: int) -> float:
    """A standard normal number that belongs to the request."""
    return NormalDist().inv_cdf(_uniform(seed, request))


def _uniform(seed: int, request: int) -> float:
    """A number in (0, 1) that belongs to the request: splitmix64's output function."""
    word = (seed * 0x632BE59BD9B4E019 + (request + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return ((word ^ word >> 31) + 0.5) / (_WORD + 1)


_WORD = (1 << 64) - 1
