"""The largest rate at which something holds: bracketed by doubling, then halved on a logarithmic scale.

Each search asks for one rate at a time; many searches are carried on together, so that what they ask for in a round can
be measured side by side. All of them ask on the same grid: start x 2 ** k, and its halvings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

from experiments.settings import SettingError

STEPS = 12
"""Doublings and halvings from the start at most: a factor of 4,096."""


@dataclass(slots=True)
class Search:
    """`low`: the largest rate that held, 0 if none has; `high`: the smallest that did not, infinite if all have."""

    start: float
    tolerance: float
    low: float = 0.0
    high: float = inf
    asked: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.start < inf:
            raise SettingError(f"--start {self.start:g} must be a rate above 0")
        if not 0 < self.tolerance < 1:
            raise SettingError(f"--tolerance {self.tolerance:g} must lie between 0 and 1")

    @property
    def rate(self) -> float | None:
        """What to ask next; None when it is known well enough, or cannot be found near the start."""
        if self.low and self.high < inf:
            if self.high / self.low <= 1 + self.tolerance:
                return None
            return sqrt(self.low * self.high)
        if len(self.asked) > STEPS:
            return None
        if not self.asked:
            return self.start
        return self.low * 2 if self.low else self.high / 2

    def tell(self, rate: float, holds: bool) -> None:
        self.asked.append((rate, holds))
        if holds:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)

    @property
    def found(self) -> bool:
        """Both a rate that holds and one that does not are known."""
        return self.low > 0 and self.high < inf

    @property
    def capacity(self) -> float:
        """Between the two, in the logarithm; 0 if nothing held, infinite if everything did."""
        if not self.low:
            return 0.0
        return sqrt(self.low * self.high) if self.high < inf else inf
