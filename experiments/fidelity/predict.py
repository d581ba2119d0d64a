"""Every step of a recorded run beside what a cost model says of it: seconds on stages, and the host between steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.settings import SettingError
from playground.core import Slice
from playground.sim.cost import CostModel, Shape
from playground.sim.cost.fitted import kind
from playground.sim.cost.throttle import Heats
from playground.sim.durations import Throttled
from playground.trace import read

PREDICTED = pa.schema(
    {
        "step": pa.int64(),
        "lane": pa.string(),
        "stage": pa.int32(),
        "kind": pa.string(),  # decode, prefill or mixed
        "tokens": pa.int64(),
        "sequences": pa.int64(),
        "measured": pa.float64(),  # seconds on the stage
        "predicted": pa.float64(),
        "gap_measured": pa.float64(),  # host seconds from the step before to this one; null: see Hosts
        "gap_predicted": pa.float64(),
    }
)
STEPS = ["step", "group", "lane", "planned", "started", "finished", "count", "stage_started", "stage_finished"]
SLICES = ["step", "sequence", "rank", "start", "length", "samples", "lane"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A step's lane as it was recorded: one row of `steps`. Times in seconds of the run."""

    step: int
    group: int
    name: str
    planned: float
    started: float
    finished: float
    stages: tuple[tuple[float, float], ...]


class Hosts:
    """Which steps waited for nothing but the host: lanes are shown in order of commits.

    Such a step is planned at the first look after the one before it came back, and somebody was there to be served
    then. While others are in flight the host works beside the devices; with nobody there it waits for arrivals.
    """

    def __init__(self, run: Path) -> None:
        looks = read(run, "looks", ["now", "commits"]).to_pydict()
        self._looks: list[float] = looks["now"]
        self._commits: list[int] = looks["commits"]
        self._came = [self._looks[look] for look in read(run, "arrivals", ["look"]).column("look").to_pylist()]
        self._went = sorted(read(run, "requests", ["finished"]).column("finished").to_pylist())
        self._committed = 0
        self._before: dict[int, tuple[int, float]] = {}
        """By group: how many lanes were back with its last one, and when that was."""

    def gap(self, lane: Lane) -> float | None:
        """Seconds from the end of the group's lane before to the start of this one, if they were the host's."""
        before = self._before.get(lane.group)
        self._committed += 1
        self._before[lane.group] = self._committed, lane.finished
        if before is None:
            return None
        commits, finished = before
        first = bisect_left(self._commits, commits)
        if self._looks[first] != lane.planned or not self._served(finished, lane.planned):
            return None
        return lane.started - finished

    def _served(self, finished: float, planned: float) -> bool:
        """Whether anybody who had come before that look was still there when the step before had finished."""
        return bisect_left(self._came, planned) > bisect_right(self._went, finished)


def predict(run: Path, cost: CostModel, file: Path) -> None:
    """Write `PREDICTED`: lanes with slices on one rank, for what copies and lockstep take is no step's own."""
    shapes, hosts = _shapes(run), Hosts(run)
    heats = Heats(cost.throttle) if isinstance(cost, Throttled) and cost.throttle.slope else None
    found: list[tuple[Any, ...]] = []
    for lane in _lanes(run):
        gap = hosts.gap(lane)
        if (shape := shapes.get((lane.step, lane.name))) is None:
            continue
        about = kind(shape), shape.tokens, shape.sequences
        gaps = (None, None) if gap is None else (gap, cost.host(shape))
        for stage, (started, finished) in enumerate(lane.stages):
            seconds = _stage(cost, heats, lane.group, shape, stage, started)
            found.append((lane.step, lane.name, stage, *about, finished - started, seconds, *gaps))
            gaps = (None, None)  # they are the first stage's
    columns: list[Any] = list(zip(*found, strict=True)) or [[] for _ in PREDICTED]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PREDICTED, strict=True)]
    pq.write_table(pa.table(arrays, PREDICTED), file)


def _stage(cost: CostModel, heats: Heats | None, group: int, shape: Shape, stage: int, started: float) -> float:
    alone = cost.stage(shape, stage)
    if heats is None or not shape.prefill_tokens:
        return alone.device_time
    return alone.device_time * heats.pass_through((group, stage), started, alone.device_time, alone.compute)


def _lanes(run: Path) -> Iterator[Lane]:
    """In order of commits."""
    for row in read(run, "steps", STEPS).to_pylist():
        if row["count"] > 1:  # only a simulated backend has them
            raise SettingError(f"{run}: merged steps; run it with backend.skip_ahead=false")
        times = row["planned"], row["started"], row["finished"]
        stages: tuple[tuple[float, float], ...] = ((row["started"], row["finished"]),)
        if row["stage_started"]:
            stages = tuple(zip(row["stage_started"], row["stage_finished"], strict=True))
        yield Lane(row["step"], row["group"], row["lane"], *times, stages)


def _shapes(run: Path) -> dict[tuple[int, str], Shape]:
    """By step and lane."""
    parts: dict[tuple[int, str], list[Slice]] = {}
    for step, sequence, rank, start, length, samples, lane in zip(
        *read(run, "slices", SLICES).to_pydict().values(), strict=True
    ):
        parts.setdefault((step, lane), []).append(Slice(sequence, 0, rank, start, length, samples, ()))
    return {key: Shape.of(slices) for key, slices in parts.items() if len({part.rank for part in slices}) == 1}
