"""Which workloads are plausible: a range for each parameter, within what recordings show.

Points of the space are coordinates in [0, 1]; values have three digits, so that a workload can be told in a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log

from experiments.settings import SettingError
from experiments.trials import Overrides

Point = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One option of a workload, between `low` and `high`, on a logarithmic scale."""

    name: str
    option: str
    low: float
    high: float

    def value(self, at: float) -> float:
        """At a coordinate; never outside of the range for the rounding."""
        found = float(f"{exp(log(self.low) + at * (log(self.high) - log(self.low))):.3g}")
        return min(max(found, self.low), self.high)


SPACE = (
    Dimension("rate", "workload.rate", 0.5, 20),
    Dimension("burstiness", "workload.arrivals.burstiness", 0.1, 2),
    Dimension("prompt.mean", "workload.lengths.prompt.mean", 128, 4096),
    Dimension("prompt.sigma", "workload.lengths.prompt.sigma", 0.2, 1.5),
    Dimension("output.mean", "workload.lengths.output.mean", 24, 768),
    Dimension("output.sigma", "workload.lengths.output.sigma", 0.2, 1.5),
)
"""Gamma arrivals (a burstiness of 1 is Poisson, of 0.1 has a coefficient of variation of 3.2), log-normal lengths. The
ranges hold means of chats, code, documents and long answers (docs/search.md), and sigmas of logarithms up to 1.5."""
COMMON = ("workload=gamma", "workload.max_length=8192", "workload.max_tokens=2048", "workload.max_output=2048")
"""Policies are told 2,048 as `max_tokens`, and not what will come."""


def ranged(words: Sequence[str], space: Sequence[Dimension] = SPACE) -> tuple[Dimension, ...]:
    """The space with ranges as given: `rate=1:4`, or `rate=2` for a fixed value."""
    found = {dimension.name: dimension for dimension in space}
    for word in words:
        name, _, told = word.partition("=")
        if name not in found:
            raise SettingError(f"--range {word}: no such parameter; choose one of: {', '.join(found)}")
        low, _, high = told.partition(":")
        try:
            ends = float(low), float(high or low)
        except ValueError:
            raise SettingError(f"--range {word}: needs numbers, as {name}=1:4") from None
        if not 0 < ends[0] <= ends[1] or not isfinite(ends[1]):
            raise SettingError(f"--range {word}: needs 0 < LOW <= HIGH")
        found[name] = replace(found[name], low=ends[0], high=ends[1])
    return tuple(found.values())


def values(space: Sequence[Dimension], point: Point) -> dict[str, float]:
    """By name."""
    return {dimension.name: dimension.value(at) for dimension, at in zip(space, point, strict=True)}


def overrides(space: Sequence[Dimension], point: Point, requests: int) -> Overrides:
    """The workload's."""
    options = [f"{one.option}={one.value(at):g}" for one, at in zip(space, point, strict=True)]
    return (*COMMON, f"workload.requests={requests}", *options)
