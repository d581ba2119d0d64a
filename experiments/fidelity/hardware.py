"""The runs of a plan on the machine, one after another, as long as there is time: a stop loses the one that runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic

from omegaconf import DictConfig

from experiments import provenance, run
from experiments.composing import composed
from experiments.fidelity.plan import Point

POINT = "point.json"
FINISHED = POINT
"""Written last."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a plan."""

    done: list[str]
    left: list[str]


def serve(points: Sequence[Point], study: Path, more: Sequence[str] = (), budget: float = inf) -> Served:
    """Every point that is not finished, unless it would not end within `budget` seconds, as long as the longest took.

    `more`: overrides for all of them.
    """
    began, longest = monotonic(), 0.0
    served = Served([], [])
    for point in points:
        folder = study / "hardware" / point.name
        if (folder / FINISHED).is_file():
            served.done.append(point.name)
            continue
        if monotonic() - began + longest > budget:
            served.left.append(point.name)
            continue
        since = monotonic()
        _run(point, folder, more)
        served.done.append(point.name)
        longest = max(longest, monotonic() - since)
        print(f"{point.name}: {monotonic() - since:.1f} s", file=sys.stderr, flush=True)
    return served


def _run(point: Point, folder: Path, more: Sequence[str]) -> None:
    if folder.exists():  # what an interrupted run left is no result, but may tell something
        aside = folder.with_name(f"{folder.name}.interrupted")
        number = 1
        while aside.exists():
            aside, number = folder.with_name(f"{folder.name}.interrupted-{number}"), number + 1
        folder.rename(aside)
    config: DictConfig = composed([*point.overrides, *more])
    config.run_dir = str(folder)
    run.execute(config, point.name)
    provenance.write(folder / POINT, point.labels())
