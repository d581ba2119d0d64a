"""Steps of recorded runs, as shapes and the seconds they took: what a cost model is fitted to and held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.core import Slice
from playground.sim.cost.shape import Shape
from playground.trace import read

STEP_COLUMNS = ["step", "lane", "started", "finished", "host", "copied_blocks", "count", "ticks"]
STAGE_COLUMNS = ["stage_started", "stage_finished"]
SLICE_COLUMNS = ["step", "sequence", "rank", "start", "length", "samples"]


@dataclass(frozen=True, slots=True)
class Logged:
    """One step of one rank, alone on its devices."""

    shape: Shape
    seconds: tuple[float, ...]
    """On each stage."""
    host: float


def steps(run: Path | str) -> list[Logged]:
    """In order of commits, merged rows taken apart. Steps with several lanes, ranks or copies are left out: what they
    took is no rank's own. `ValueError` if none is left or the folder holds no run."""
    try:
        rows = read(run, "steps", STEP_COLUMNS + STAGE_COLUMNS).to_pylist()
        slices = read(run, "slices", SLICE_COLUMNS).to_pydict()
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    parts = _by_step(slices)
    lanes = Counter(row["step"] for row in rows)
    found = [
        logged
        for row in rows
        if lanes[row["step"]] == 1 and not row["copied_blocks"] and _one_rank(parts.get(row["step"], []))
        for logged in _repetitions(row, parts[row["step"]])
    ]
    if not found:
        raise ValueError(f"{run}: no step ran alone on one rank: log a run with one lane and without lockstep")
    return found


def _by_step(columns: dict[str, list[Any]]) -> dict[int, list[Slice]]:
    parts: dict[int, list[Slice]] = {}
    for step, sequence, rank, start, length, samples in zip(*(columns[name] for name in SLICE_COLUMNS), strict=True):
        parts.setdefault(step, []).append(Slice(sequence, 0, rank, start, length, samples, ()))
    return parts


def _one_rank(parts: list[Slice]) -> bool:
    return len({part.rank for part in parts}) == 1


def _repetitions(row: dict[str, Any], parts: list[Slice]) -> Iterator[Logged]:
    shape, count = Shape.of(parts), row["count"]
    if row["stage_started"]:
        stages = len(row["stage_started"]) // count
        times = [end - start for start, end in zip(row["stage_started"], row["stage_finished"], strict=True)]
        for number in range(count):
            seconds = tuple(times[number * stages : (number + 1) * stages])
            yield Logged(shape.tick(number) if number else shape, seconds, row["host"])
        return
    ticks = row["ticks"] or [row["finished"]]
    yield Logged(shape, (ticks[0] - row["started"],), row["host"])
    for number in range(1, count):
        yield Logged(shape.tick(number), (ticks[number] - ticks[number - 1] - row["host"],), row["host"])
