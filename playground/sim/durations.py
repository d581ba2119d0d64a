"""How long the parts of a step take: a cost model's answers put together over ranks, lanes and stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple, Protocol, runtime_checkable

from playground.core import Columns, Slice, Step
from playground.sim.cost import CostModel, Shape


class Work(NamedTuple):
    """Seconds of one lane of a step on one stage, where others may use the same links."""

    kernels: float
    """On the device, latencies of exchanges included: the links are free meanwhile."""
    wire: float
    """On the port of the stage's collectives."""
    overlaps: bool = False
    """Whether kernels and exchanges go on at the same time."""
    tail: float = 0.0
    """What overlaps with nothing, after both."""

    @property
    def alone(self) -> float:
        """With devices and links to oneself."""
        busy = max(self.kernels, self.wire) if self.overlaps else self.kernels + self.wire
        return busy + self.tail


class LaneTimes(NamedTuple):
    """One lane of a step: on each stage, and from one stage to the next.

    In seconds, or in what the backend's machine takes instead: `Work` on stages and bytes between them.
    """

    stages: tuple[Any, ...]
    transfer: float = 0.0


class StepTimes(NamedTuple):
    """Seconds of a step: of planning it (the devices work on meanwhile), and of each of its lanes."""

    host: float
    lanes: dict[str, LaneTimes]


class Durations(Protocol):
    """How long steps take. Asked once for each, at its launch."""

    def of(self, step: Step) -> StepTimes: ...

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        """(host, stage) seconds of the step's second, third, ... repetition."""
        ...


@runtime_checkable
class Ticking(Protocol):
    """A cost model that tells at a fraction of the time what decodes cost while nothing but their contexts grows."""

    def ticking(self, shape: Shape) -> Iterator[float]:
        """`device_time` on the only stage of `shape.tick(1)`, `shape.tick(2)` and so on without end, to the last bit
        what `stage` says of each; `host` must not depend on contexts."""
        ...


class Modelled:
    """Durations that a cost model predicts. A lockstep group takes as long as its slowest rank."""

    def __init__(self, cost: CostModel, stages: int = 1) -> None:
        self._cost = cost
        self._ticking = cost.ticking if isinstance(cost, Ticking) else None
        self._stages = range(stages)

    def of(self, step: Step) -> StepTimes:
        if len(step.lanes) == 1 and not step.copies:
            shapes = _shapes(step.columns)
            return StepTimes(self._host(shapes), {step.lanes[0]: self._lane(shapes)})
        copied = dict.fromkeys([copy.lane for copy in step.copies])
        lanes = {
            lane: self._copies(step, lane) if lane in copied else self._lane(_shapes(step.columns_of(lane)))
            for lane in step.lanes
        }
        return StepTimes(self._host(_shapes(step.columns)), lanes)

    def _copies(self, step: Step, lane: str) -> LaneTimes:
        """Every rank has a copy engine of its own."""
        blocks: dict[int, int] = {}
        for copy in step.copies:
            if copy.lane == lane:
                blocks[copy.rank] = blocks.get(copy.rank, 0) + len(copy.source)
        return LaneTimes((max(map(self._cost.copy, blocks.values())),))

    def _lane(self, shapes: list[Shape]) -> LaneTimes:
        cost = self._cost
        if len(shapes) == 1:  # every step of a lone replica: spare the generators
            shape = shapes[0]
            times = tuple([cost.stage(shape, stage).device_time for stage in self._stages])
        else:
            times = tuple(max(cost.stage(shape, stage).device_time for shape in shapes) for stage in self._stages)
        return LaneTimes(times, max(map(cost.transfer, shapes)) if len(times) > 1 else 0.0)

    def _host(self, shapes: list[Shape]) -> float:
        """Every rank plans for itself, at the same time."""
        return max(map(self._cost.host, shapes), default=0.0)

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        cost, shape = self._cost, Shape.of_columns(step.columns)
        if self._ticking:
            return zip(repeat(cost.host(shape)), self._ticking(shape))
        return self._ticks(shape)

    def _ticks(self, shape: Shape) -> Iterator[tuple[float, float]]:
        cost = self._cost
        while True:
            shape = shape.tick()
            yield cost.host(shape), cost.stage(shape, 0).device_time


def _shapes(slices: Columns) -> list[Shape]:
    """One a rank, in order of first use."""
    ranks = slices.rank
    if ranks and ranks.count(ranks[0]) == len(ranks):
        return [Shape.of_columns(slices)]
    by_rank: dict[int, list[Slice]] = {}
    for part in map(Slice._make, zip(*slices, strict=True)):
        by_rank.setdefault(part.rank, []).append(part)
    return [Shape.of(slices) for slices in by_rank.values()]
