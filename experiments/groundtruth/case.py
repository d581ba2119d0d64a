"""What a case is: something that was measured, and how to predict it. Knows no source and no simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from experiments.groundtruth.calibration import Calibration

Split = Literal["fit", "test"]
Load = Literal["below saturation", "saturated", "static"]
Metrics = Mapping[str, float]
"""Seconds (ttft, tpot, e2el, makespan, step) and tokens a second (throughput), by name."""


class Unsupported(ValueError):
    """A cost model cannot say anything about a case; the message says why."""


class Trial(Protocol):
    """How a case is predicted."""

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        """With this cost model. Raises `Unsupported` where it has no answer."""
        ...

    def floor(self) -> Metrics:
        """Seconds that some of the metrics take at the least by the device's sheet: a measurement below them was not
        made of what its source says."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement whose configuration is known well enough to be repeated.

    `load` tells apart where a small error of capacity is a small error of latency (below saturation) from where it is
    not. `assumed` names what the source does not say and we had to choose.
    """

    source: str
    name: str
    split: Split
    engine: str
    model: str
    device: str
    tp: int
    load: Load
    measured: Metrics
    trial: Trial
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Measurements that are not replayed, and why."""

    source: str
    what: str
    cases: int
    why: str
