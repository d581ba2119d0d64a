"""One step, or two, of known shape: what a cost model says of it, with no scheduling at all."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.groundtruth.calibration import Calibration, Unknowns
from experiments.groundtruth.case import Metrics
from experiments.groundtruth.costs import Hardware, cost_model
from experiments.groundtruth.physics import Floor
from playground.core import Slice
from playground.sim.cost import CostModel, Shape


def prefills(count: int, length: int, history: int = 0) -> list[Slice]:
    """Prompts computed whole, each yielding a token."""
    return [Slice(number, 0, 0, history, length, True, ()) for number in range(count)]


def decodes(count: int, context: int) -> list[Slice]:
    """Decodes with so many tokens before each."""
    return [Slice(-1 - number, 0, 0, context, 1, True, ()) for number in range(count)]


def step_time(cost: CostModel, slices: list[Slice]) -> float:
    """Seconds of a step on one stage, its planning included."""
    shape = Shape.of(slices)
    return cost.host(shape) + cost.stage(shape, 0).device_time


def floor(hardware: Hardware, slices: list[Slice]) -> float:
    """Seconds that the step takes at the least."""
    return Floor.of(hardware.shape, hardware.sheet, hardware.tp).seconds(Shape.of(slices))


@dataclass(frozen=True, slots=True)
class Batch:
    """A static batch: all prompts in one step, then decodes until each has `output` tokens."""

    hardware: Hardware
    name: str
    size: int
    prompt: int
    output: int

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        model = cost_model(cost, self.hardware, calibration.get(self.name, Unknowns()))
        first, later = step_time(model, self._first), step_time(model, self._later)
        return {"ttft": first, "tpot": later, "e2el": first + later * (self.output - 1)}

    def floor(self) -> Metrics:
        return {"ttft": floor(self.hardware, self._first), "tpot": floor(self.hardware, self._later)}

    @property
    def _first(self) -> list[Slice]:
        return prefills(self.size, self.prompt)

    @property
    def _later(self) -> list[Slice]:
        """At the mean context: time is linear in it."""
        return decodes(self.size, self.prompt + self.output // 2)


@dataclass(frozen=True, slots=True)
class Mixed:
    """A step that computes one prompt and decodes for the others."""

    hardware: Hardware
    name: str
    prompt: int
    others: int
    context: int

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        model = cost_model(cost, self.hardware, calibration.get(self.name, Unknowns()))
        return {"step": step_time(model, self._slices)}

    def floor(self) -> Metrics:
        return {"step": floor(self.hardware, self._slices)}

    @property
    def _slices(self) -> list[Slice]:
        return prefills(1, self.prompt) + decodes(self.others, self.context)
