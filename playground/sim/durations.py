"""How long the parts of a step take: a cost model's answers put together over ranks, lanes and stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from math import inf
from typing import Any, NamedTuple, Protocol, runtime_checkable

from playground.core import NO_SLICES, Columns, Slice, Step
from playground.sim.cost import Cost, CostModel, Shape
from playground.sim.cost.profile import Throttle
from playground.sim.cost.throttle import Heats
from playground.sim.processor import Kernels


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
    compute: float = inf
    memory: float = inf
    """Of the kernels' seconds, those of arithmetic and of bandwidth at full rate, which other lanes cannot have."""

    @property
    def alone(self) -> float:
        """With devices and links to oneself."""
        busy = max(self.kernels, self.wire) if self.overlaps else self.kernels + self.wire
        return busy + self.tail

    @property
    def demand(self) -> Kernels:
        """What it asks of the device."""
        return Kernels(self.kernels, self.compute, self.memory)


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


@runtime_checkable
class Repeating(Durations, Protocol):
    """Durations that also know what a step's second, third, ... repetition takes, without end."""

    def repetitions(self, step: Step) -> Iterator[StepTimes]: ...

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        """The same of a step on a lone stage, as (host, stage) seconds; the host's are those of the step itself."""
        ...


@runtime_checkable
class Ticking(Protocol):
    """A cost model that tells at a fraction of the time what decodes cost while nothing but their contexts grows."""

    def ticking(self, shape: Shape) -> Iterator[float]:
        """`device_time` on the only stage of `shape.tick(1)`, `shape.tick(2)` and so on without end, to the last bit
        what `stage` says of each; `host` must not depend on contexts."""
        ...


@runtime_checkable
class Throttled(Protocol):
    """A cost model of a device whose clocks fall while it multiplies."""

    @property
    def throttle(self) -> Throttle: ...


def on_lone_stage(times: StepTimes) -> tuple[float, float]:
    """(host, stage) seconds of a step whose only lane has its only stage to itself."""
    ((work,),) = [lane.stages for lane in times.lanes.values()]
    return times.host, work.seconds if isinstance(work, Kernels) else work


class Modelled:
    """Durations that a cost model predicts. A lockstep group takes as long as its slowest rank."""

    def __init__(self, cost: CostModel, stages: int = 1) -> None:
        self._cost = cost
        self._heats = Heats(cost.throttle) if isinstance(cost, Throttled) and cost.throttle.slope else None
        self._ticking = cost.ticking if isinstance(cost, Ticking) else None
        self._stages = range(stages)
        self._counted: tuple[Columns, list[Shape]] = (NO_SLICES, [])
        """The slices that were asked of last, and their shapes: their repetitions are asked of next."""

    def of(self, step: Step) -> StepTimes:
        if len(step.lanes) == 1 and not step.copies:
            shapes = self._shapes(step.columns)
            host, times = self._host(shapes), self._lane(shapes)
            if self._heats is not None:
                times = self._slowed(self._heats, step.group, step.planned + host, shapes, times)
            return StepTimes(host, {step.lanes[0]: times})
        copied = dict.fromkeys([copy.lane for copy in step.copies])
        lanes = {
            lane: self._copies(step, lane) if lane in copied else self._lane(_shapes(step.columns_of(lane)))
            for lane in step.lanes
        }
        return StepTimes(self._host(_shapes(step.columns)), lanes)

    def _slowed(self, heats: Heats, group: int, began: float, shapes: list[Shape], times: LaneTimes) -> LaneTimes:
        """As long as a device takes that has multiplied for a while. Steps without prompts neither feel nor make heat,
        so that they repeat themselves."""
        hottest = max(shapes, key=_prefill_tokens)
        if not hottest.prefill_tokens:
            return times
        stages = []
        for stage, work in enumerate(times.stages):
            cost = self._cost.stage(hottest, stage)
            stages.append(_longer(work, heats.pass_through((group, stage), began, cost.device_time, cost.compute)))
        return times._replace(stages=tuple(stages))

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

    def _shapes(self, slices: Columns) -> list[Shape]:
        if slices is not self._counted[0]:
            self._counted = slices, _shapes(slices)
        return self._counted[1]

    def _host(self, shapes: list[Shape]) -> float:
        """Every rank plans for itself, at the same time."""
        return max(map(self._cost.host, shapes), default=0.0)

    def repetitions(self, step: Step) -> Iterator[StepTimes]:
        (lane,), shapes = step.lanes, self._shapes(step.columns)
        host = self._host(shapes)
        while True:
            shapes = [shape.tick() for shape in shapes]
            yield StepTimes(host, {lane: self._lane(shapes)})

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        shapes = self._shapes(step.columns)
        host = self._host(shapes)
        if self._ticking and len(shapes) == 1:
            return zip(repeat(host), self._ticking(shapes[0]))
        return map(on_lone_stage, self.repetitions(step))


class Demanding(Modelled):
    """Durations that say what lanes ask of the device, for laws of contention that look at it."""

    def _lane(self, shapes: list[Shape]) -> LaneTimes:
        cost = self._cost
        costs = [max([cost.stage(shape, stage) for shape in shapes], key=_device_time) for stage in self._stages]
        times = tuple([Kernels(one.device_time, one.compute, one.memory) for one in costs])
        return LaneTimes(times, max(map(cost.transfer, shapes)) if len(times) > 1 else 0.0)


def _prefill_tokens(shape: Shape) -> int:
    return shape.prefill_tokens


def _longer(work: Any, factor: float) -> Any:
    """Of seconds, or of kernels' among them."""
    if isinstance(work, Kernels):
        return work._replace(seconds=work.seconds * factor)
    if isinstance(work, Work):
        return work._replace(kernels=work.kernels * factor)
    return work * factor


def _device_time(cost: Cost) -> float:
    return cost.device_time


def _shapes(slices: Columns) -> list[Shape]:
    """One a rank, in order of first use."""
    ranks = slices.rank
    if ranks and ranks.count(ranks[0]) == len(ranks):
        return [Shape.of_columns(slices)]
    by_rank: dict[int, list[Slice]] = {}
    for part in map(Slice._make, zip(*slices, strict=True)):
        by_rank.setdefault(part.rank, []).append(part)
    return [Shape.of(slices) for slices in by_rank.values()]
