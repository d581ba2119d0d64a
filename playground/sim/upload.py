"""A step's inputs on their way to the device: ids, positions, slots and block tables that the host has prepared.

Either they come before the step's kernels, on the device's own stream, or in the copy engine's inward lane, where those
of the next step travel while one computes (RapidLLM's L1; the lane is that of swap copies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from simpy.core import Environment

from playground.core import COPY_IN, Columns, Spec, Step
from playground.sim.backend import Machine, Resource
from playground.sim.device import Device
from playground.sim.durations import LaneTimes, Repeating, StepTimes, Work, on_lone_stage
from playground.sim.processor import Finished, Kernels

UPLOADS = ("none", "before", "lane")
TOKEN_BYTES = 4 + 8 + 8
"""Id (int32), position and KV slot (int64) of each token, as vLLM's v1 runner uploads them."""
BLOCK_BYTES = 4
"""An entry of a block table; whole tables travel."""


def input_bytes(slices: Columns, block_size: int, ticks: int = 0) -> int:
    """Of the rank that has most to upload, when every slice is so many tokens further."""
    by_rank: dict[int, int] = {}
    for rank, start, length in zip(slices.rank, slices.start, slices.length, strict=True):
        blocks = -(-(start + ticks + length) // block_size)
        by_rank[rank] = by_rank.get(rank, 0) + TOKEN_BYTES * length + BLOCK_BYTES * blocks
    return max(by_rank.values())


class Upload(NamedTuple):
    """Seconds of the copy, then what the stage does."""

    seconds: float
    work: Any


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Durations whose lanes begin with an upload of `device.host_latency` and bytes / `device.host_link`.

    `uploads`: `before`: the device waits for it; `lane`: told as `Upload`, for a machine that has `with_uploads`.
    """

    inner: Repeating
    device: Device
    block_size: int
    uploads: str

    def of(self, step: Step) -> StepTimes:
        return self._uploading(step, self.inner.of(step), 0)

    def repetitions(self, step: Step) -> Iterator[StepTimes]:
        return (self._uploading(step, times, tick) for tick, times in enumerate(self.inner.repetitions(step), 1))

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        return map(on_lone_stage, self.repetitions(step))

    def _uploading(self, step: Step, times: StepTimes, tick: int) -> StepTimes:
        copied = {copy.lane for copy in step.copies}
        lanes = {
            name: lane if name in copied else self._begun(step.columns_of(name), lane, tick)
            for name, lane in times.lanes.items()
        }
        return times._replace(lanes=lanes)

    def _begun(self, slices: Columns, lane: LaneTimes, tick: int) -> LaneTimes:
        size = input_bytes(slices, self.block_size, tick)
        seconds = self.device.host_latency + size / self.device.host_link
        first, *others = lane.stages
        begun = Upload(seconds, first) if self.uploads == "lane" else _later(seconds, first)
        return lane._replace(stages=(begun, *others))


def _later(seconds: float, work: Any) -> Any:
    if isinstance(work, Kernels):
        return work._replace(seconds=work.seconds + seconds)
    if isinstance(work, Work):
        return work._replace(kernels=work.kernels + seconds)
    return work + seconds


class Receiving:
    """A first stage whose work begins when its inputs have come through a copy engine."""

    def __init__(self, stage: Resource, engine: Resource) -> None:
        self._stage = stage
        self._engine = engine

    def submit(self, lane: str, work: Any, finished: Finished) -> None:
        """Upload, then do the work."""
        assert isinstance(work, Upload)
        self._engine.submit(COPY_IN, work.seconds, lambda *_: self._stage.submit(lane, work.work, finished))


Build = Callable[[Environment, Spec], Machine]


def with_uploads(build: Build) -> Build:
    """The same machine, with first stages that receive."""

    def made(environment: Environment, spec: Spec) -> Machine:
        machine = build(environment, spec)
        stages = [
            [Receiving(first, engine), *others]
            for (first, *others), engine in zip(machine.stages, machine.engines, strict=True)
        ]
        return machine._replace(stages=stages)

    return made


def check_uploads(uploads: str) -> None:
    """Refuse what is none of the ways."""
    if uploads not in UPLOADS:
        raise ValueError(f"backend.uploads={uploads} must be one of {', '.join(UPLOADS)}")
