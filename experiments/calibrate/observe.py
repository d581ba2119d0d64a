"""What a calibration's folder holds, as a fit takes it: steps with their shapes, gaps on the host, copies, links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import Table

from experiments.calibrate.design import Group
from experiments.calibrate.measure import read as read_samples
from playground.core import Slice
from playground.sim.cost import Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.tabulating import Seen
from playground.trace import expand

IDLE = 2e-3
"""Seconds from the end of a step to the next decision, beyond which the host had nothing to do."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds from the end of one step to the start of the next, which the host planned and prepared meanwhile."""

    shape: Shape
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a calibration measured."""

    seen: list[Seen]
    gaps: list[Gap]
    copies: list[tuple[int, float, float]]
    """(blocks, seconds to the host, seconds back)"""
    links: list[tuple[int, float]]
    """(tokens, seconds from one stage to the next)"""
    spread: list[float]
    """Of each probe, (largest - least) / median of its repetitions, all stages together."""
    untimed: list[str]
    """Steps of which a stage is said to have taken no time: word of the stage before came late. They are left out."""


def observe(folder: Path, facts: Mapping[str, Any], sheet: Roofline, runs: Sequence[Path] = ()) -> Observed:
    """`runs`: folders of other runs of the same engine."""
    found = Observed([], [], [], [], [], [])
    _samples(folder, facts, sheet, found)
    served = [file.parent for file in sorted((folder / "served").glob("*/config.yaml"))]
    for session, run in enumerate([*served, *runs], 1):
        _served(run, facts["spec"]["block_size"], sheet, session, found)
    return found


def _samples(folder: Path, facts: Mapping[str, Any], sheet: Roofline, found: Observed) -> None:
    kept = read_samples(folder)
    rows = []
    for name, probe in facts["probes"].items():
        samples = kept.get(name, {}).values()
        if probe["copied_blocks"]:
            found.copies.extend((probe["copied_blocks"], *sample.stages[:2]) for sample in samples)
            continue
        shape = shape_of(probe["groups"])
        rows += [(sample.at, probe["family"], name, shape, sample) for sample in samples]
        totals = sorted(sum(sample.stages) for sample in samples)
        if len(totals) > 1:
            found.spread.append((totals[-1] - totals[0]) / totals[len(totals) // 2])
    for name, probes in facts["ramps"].items():
        for turn, sample in kept.get(f"ramp {name}", {}).items():
            probe = probes[turn]
            rows.append((sample.at, "ramp", f"{name} {turn}", shape_of(probe["groups"]), sample))
    for at, family, name, shape, sample in sorted(rows, key=lambda row: row[0]):
        if not _timed(sample.stages, name, found):
            continue
        found.seen.append(Seen(family, name, at, shape, sample.stages, _products(sheet, shape)))
        found.links.extend((shape.tokens, seconds) for seconds in sample.links)


def shape_of(groups: Sequence[Sequence[Any]]) -> Shape:
    """Of a step that is made of these groups, or of a file's lists in their place."""
    return Shape.of(
        Slice(0, 0, 0, start, length, bool(samples), ())
        for count, start, length, samples in map(Group._make, groups)
        for _ in range(count)
    )


def _products(sheet: Roofline, shape: Shape) -> tuple[float, ...]:
    return tuple(sheet.stage(shape, stage).compute for stage in range(sheet.stages))


def _served(run: Path, block_size: int, sheet: Roofline, session: int, found: Observed) -> None:
    """Of one rank and lane. A simulated backend repeats steps in one row: each repetition is a step here."""
    steps, slices = expand(run, block_size)
    shapes, before = _shapes(slices.select(SLICES)), 0.0
    for row in steps.select(STEPS).to_pylist():
        if (shape := shapes.get(row["step"])) is not None and not row["copied_blocks"]:
            seconds = _stages(row)
            name = f"{session} {row['step']}"
            if _timed(seconds, name, found):
                products = _products(sheet, shape)
                found.seen.append(Seen(f"served {run.name}", name, row["started"], shape, seconds, products, session))
            if 0 <= row["planned"] - before < IDLE:
                found.gaps.append(Gap(shape, row["started"] - before))
        before = row["finished"]


def _timed(stages: Sequence[float], name: str, found: Observed) -> bool:
    """Whether every stage took time."""
    if min(stages) > 0:
        return True
    found.untimed.append(name)
    return False


STEPS = ["step", "planned", "started", "finished", "copied_blocks", "stage_started", "stage_finished"]
SLICES = ["step", "sequence", "rank", "start", "length", "samples"]


def _shapes(slices: Table) -> dict[int, Shape]:
    parts: dict[int, list[Slice]] = {}
    for step, sequence, rank, start, length, samples in zip(*slices.to_pydict().values(), strict=True):
        parts.setdefault(step, []).append(Slice(sequence, 0, rank, start, length, samples, ()))
    return {step: Shape.of(own) for step, own in parts.items()}


def _stages(row: Mapping[str, Any]) -> tuple[float, ...]:
    if not row["stage_started"]:
        return (row["finished"] - row["started"],)
    return tuple(end - start for start, end in zip(row["stage_started"], row["stage_finished"], strict=True))
