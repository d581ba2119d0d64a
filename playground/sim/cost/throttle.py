"""A device at its power limit lowers its clocks while it multiplies: steps with prompts get slower as it heats up.

The state is one number, kept where the durations of a run are told, since a cost model has none.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import exp

from playground.sim.cost.profile import Throttle


@dataclass(slots=True)
class Heat:
    """Of one device. Only steps with prompts change it; between them it falls off."""

    throttle: Throttle
    _value: float = 0.0
    _until: float = 0.0

    def at(self, now: float) -> float:
        return self._value * exp(-max(now - self._until, 0.0) / self.throttle.seconds)

    def factor(self, now: float, share: float) -> float:
        """How many times as long a step takes that begins now and multiplies for that share of its time."""
        throttle = self.throttle
        if not throttle.slope or not share:
            return 1.0
        return 1.0 + throttle.slope * share * max(self.at(now) - throttle.onset, 0.0)

    def spent(self, began: float, seconds: float, share: float) -> None:
        """Such a step took so long."""
        left = exp(-seconds / self.throttle.seconds)
        self._value = share + (self.at(began) - share) * left
        self._until = began + seconds


class Heats:
    """Of many devices, by whatever tells them apart."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._heats: dict[Hashable, Heat] = {}

    def pass_through(self, device: Hashable, began: float, seconds: float, products: float) -> float:
        """How many times as long a step takes that would take so many seconds cold, and multiplies for so many."""
        heat = self._heats.setdefault(device, Heat(self._throttle))
        share = min(products / seconds, 1.0)
        factor = heat.factor(began, share)
        heat.spent(began, seconds * factor, share)
        return factor
