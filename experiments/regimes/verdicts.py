"""Who wins in a cell, by how much, and whether anybody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean

from analysis.intervals import over_seeds

LEVEL = 0.95
MATTERS = 0.02
"""A difference of less than this share is none, however certain it is."""

Figures = Mapping[str, Sequence[float]]
"""By policy: a figure of each seed, less is better, of the same requests in the same order."""


@dataclass(frozen=True, slots=True)
class Against:
    """A policy's figure over the best one's: the geometric mean over seeds, and its interval."""

    ratio: float
    low: float
    high: float

    @property
    def worse(self) -> bool:
        """By more than chance and by more than what matters."""
        return self.low > 1 and self.ratio > 1 + MATTERS


@dataclass(frozen=True, slots=True)
class Verdict:
    """`best`: the policy with the least geometric mean. `others` by policy, best first."""

    best: str
    value: float
    others: Mapping[str, Against]

    @property
    def winners(self) -> tuple[str, ...]:
        """The best one, and those that cannot be told from it."""
        return (self.best, *(name for name, one in self.others.items() if not one.worse))

    @property
    def differs(self) -> bool:
        """Whether the choice matters at all."""
        return any(one.worse for one in self.others.values())

    @property
    def lead(self) -> float:
        """How much more the best of those that lost has: 0.1 is a tenth. 0 where nothing differs."""
        return min((one.ratio - 1 for one in self.others.values() if one.worse), default=0.0)

    @property
    def spread(self) -> float:
        """The same of the worst."""
        return max((one.ratio - 1 for one in self.others.values() if one.worse), default=0.0)


def verdict(figures: Figures) -> Verdict:
    """Intervals are widened for the number of comparisons (Bonferroni): the best one was chosen after looking."""
    means = {policy: mean(map(log, values)) for policy, values in figures.items()}
    best, *rest = sorted(means, key=lambda policy: means[policy])
    level = 1 - (1 - LEVEL) / max(1, len(rest))
    others = {policy: _against(figures[policy], figures[best], level) for policy in rest}
    return Verdict(best, exp(means[best]), others)


def _against(mine: Sequence[float], best: Sequence[float], level: float) -> Against:
    logs = [log(one / other) for one, other in zip(mine, best, strict=True)]
    low, high = over_seeds(logs, level)
    return Against(exp(mean(logs)), exp(low), exp(high))
