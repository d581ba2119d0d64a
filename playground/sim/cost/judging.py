"""How far a calibration's predictions are off on steps that nothing was fitted to, and how sure that is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from playground.sim.cost.fitted import Array
from playground.sim.cost.profile import HeldOut

DRAWS = 1000
FEWEST = 2
"""Independent parts without which nothing can be drawn again."""


@dataclass(slots=True)
class Pairs:
    """Predicted and measured seconds of steps; those of one `part` are no independent samples."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    parts: list[Hashable] = field(default_factory=list)

    def add(self, predicted: float, measured: float, part: Hashable) -> None:
        self.predicted.append(predicted)
        self.measured.append(measured)
        self.parts.append(part)


def judged(groups: Mapping[str, Pairs]) -> dict[str, HeldOut]:
    """The error of each group, with an interval where it has parts enough."""
    return {name: _judged(pairs) for name, pairs in sorted(groups.items())}


def _judged(pairs: Pairs) -> HeldOut:
    predicted, measured = np.asarray(pairs.predicted), np.asarray(pairs.measured)
    found: HeldOut = HeldOut.of(predicted, measured)  # type: ignore[assignment]
    interval = _interval(np.abs(predicted / measured - 1), pairs.parts)
    return found if interval is None else replace(found, low=interval[0], high=interval[1])


def _interval(off: Array, parts: Sequence[Hashable], seed: int = 0) -> tuple[float, float] | None:
    """95 % of the means when whole parts are drawn again, with replacement."""
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    if len(numbers) < FEWEST:
        return None
    of = np.asarray([numbers[part] for part in parts])
    sums, counts = np.bincount(of, off), np.bincount(of)
    picks = np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))
    low, high = np.percentile(sums[picks].sum(1) / counts[picks].sum(1), [2.5, 97.5])
    return float(low), float(high)
