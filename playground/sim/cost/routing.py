"""How many tokens, and of how many experts the weights, the busiest rank gets: expected values, no chance drawn.

It knows how likely each expert is to be picked, not which token picks it. Formulas: docs/cost-model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import erf, sqrt
from typing import NamedTuple

from playground.model import Experts

_POINTS = 33
"""Of the trapezoidal rule; the error is far below that of taking loads as normal."""
_EXACT = 64
"""Tokens up to which loads are worked out one by one; beyond, 16 values an octave are interpolated."""


def uniform(experts: Experts) -> tuple[float, ...]:
    """Every expert as likely as any other."""
    return (experts.active / experts.count,) * experts.count


def zipf(experts: Experts, exponent: float) -> tuple[float, ...]:
    """The i-th expert is picked in proportion to i to the power of -exponent (0: uniform)."""
    return inclusion([(place + 1) ** -exponent for place in range(experts.count)], experts.active)


def measured(experts: Experts, counts: Sequence[float]) -> tuple[float, ...]:
    """As a histogram of tokens by expert says, in the order of the experts."""
    if len(counts) != experts.count:
        raise ValueError(f"cost.expert_counts has {len(counts)} entries; give one for each of {experts.count} experts")
    if min(counts) < 0 or sum(count > 0 for count in counts) < experts.active:
        raise ValueError(f"cost.expert_counts must be 0 or more, and above 0 for at least {experts.active} experts")
    return inclusion(counts, experts.active)


def inclusion(weights: Sequence[float], active: int) -> tuple[float, ...]:
    """How likely a token's `active` different picks include each expert: in proportion to its weight, at most 1."""
    certain: set[int] = set()
    while True:
        scale = (active - len(certain)) / sum(one for place, one in enumerate(weights) if place not in certain)
        beyond = {place for place, one in enumerate(weights) if place not in certain and scale * one > 1}
        if not beyond:
            return tuple(1.0 if place in certain else scale * one for place, one in enumerate(weights))
        certain |= beyond


class Load(NamedTuple):
    """Of one layer's experts on the busiest rank, for some number of tokens."""

    rows: float
    """(token, expert) pairs."""
    distinct: float
    """Experts that get any, whose weights are read."""


class _Rank(NamedTuple):
    """Mean and standard deviation of something that differs from rank to rank."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Loads:
    """`shares`: how likely a token is to pick each expert. Experts lie on `ranks` ranks.

    `dealt`: one by one, so that the likeliest are spread; else in blocks, as vLLM and SGLang place them.
    """

    shares: tuple[float, ...]
    ranks: int = 1
    dealt: bool = False
    _groups: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)
    _known: dict[int, Load] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.shares) // self.ranks
        blocks = [self.shares[first : first + size] for first in range(0, len(self.shares), size)]
        dealt = [self.shares[first :: self.ranks] for first in range(self.ranks)]
        object.__setattr__(self, "_groups", tuple(dealt if self.dealt else blocks))

    def of(self, tokens: int) -> Load:
        """Expected load of the busiest rank. Remembered: a simulation asks for the same numbers again and again."""
        found = self._known.get(tokens)
        if found is None:
            found = self._known[tokens] = self._between(tokens) if tokens > _EXACT else self._at(tokens)
        return found

    def _between(self, tokens: int) -> Load:
        step = 1 << (tokens.bit_length() - 5)
        if not (over := tokens % step):
            return self._at(tokens)
        below, above, part = self.of(tokens - over), self.of(tokens - over + step), over / step
        return Load(*(low + part * (high - low) for low, high in zip(below, above, strict=True)))

    def _at(self, tokens: int) -> Load:
        rows, distinct = [], []
        for group in self._groups:
            rows.append(_Rank(tokens * sum(group), sqrt(tokens * sum(one * (1 - one) for one in group))))
            met = [1 - (1 - one) ** tokens for one in group]
            distinct.append(_Rank(sum(met), sqrt(sum(one * (1 - one) for one in met))))
        size = len(self._groups[0])
        active = round(sum(self.shares))
        most_rows = tokens * min(active, size)
        return Load(min(greatest(rows), most_rows), min(greatest(distinct), size, most_rows))


def greatest(ranks: Sequence[_Rank]) -> float:
    """Expected maximum of independent normal variables: their distributions multiply.

    Loads of ranks are not independent, since their sum is fixed; with variances of independent picks the two errors
    cancel: the maximum of exchangeable normals depends on variance times (1 - correlation) only.
    """
    if len(ranks) == 1:
        return ranks[0].mean
    low = max(one.mean - 6 * one.deviation for one in ranks)
    high = max(one.mean + 6 * one.deviation for one in ranks)
    if high == low:
        return low
    alike: dict[_Rank, int] = {}
    for one in ranks:
        alike[one] = alike.get(one, 0) + 1
    width = (high - low) / (_POINTS - 1)
    above = [1 - _all_below(low + point * width, alike) for point in range(_POINTS)]
    return low + width * (sum(above) - (above[0] + above[-1]) / 2)


def _all_below(value: float, ranks: dict[_Rank, int]) -> float:
    product = 1.0
    for (mean, deviation), count in ranks.items():
        if deviation:
            product *= (0.5 + 0.5 * erf((value - mean) / deviation / sqrt(2))) ** count
        elif value < mean:
            return 0.0
    return product
