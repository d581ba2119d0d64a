"""The runs of a plan on the machine, one after another, as long as there is time: a stop loses the one that runs.

All in one process, so that CUDA starts and kernels are compiled once.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from omegaconf import DictConfig

from experiments import provenance, run
from experiments.calibrate import clocks
from experiments.composing import composed
from experiments.errors import explain, tell
from experiments.fidelity.plan import Point
from experiments.points import PROBLEM
from experiments.settings import SettingError

POINT = "point.json"
"""Written last: what holds it is finished."""
CLOCKS = "clocks.csv"


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a plan: names of points."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def finished(study: Path) -> list[Path]:
    """The folders of runs that came to their end."""
    return sorted(file.parent for file in (study / "hardware").glob(f"*/{POINT}"))


def serve(points: Sequence[Point], study: Path, more: Sequence[str] = (), budget: float = inf) -> Served:
    """Every point that is not finished, in order, until one would not end within `budget` seconds from now.

    `more`: overrides for all of them. A point that fails is told and does not take the others with it.
    `SettingError` if one is finished already, but with other overrides, or does not compose.
    """
    began, served = monotonic(), Served()
    spent = {point: seconds for point in points if (seconds := _spent(point, study, more)) is not None}
    over = False
    for number, point in enumerate(points, 1):
        if point in spent:
            served.done.append(point.name)
            continue
        over = over or monotonic() - began + expected(point, spent) > budget
        if over:
            served.left.append(point.name)
            continue
        since = monotonic()
        if _run(point, study / "hardware" / point.name, more, f"{number} of {len(points)}: {point.name}"):
            served.done.append(point.name)
            spent[point] = monotonic() - since
            print(f"{point.name}: {spent[point]:.1f} s", file=sys.stderr, flush=True)
        else:
            served.failed.append(point.name)
    return served


def expected(point: Point, spent: Mapping[Point, float]) -> float:
    """Seconds: the longest of those points that are most like this one; 0 while there is none."""

    def likeness(other: Point) -> int:
        return (other.workload == point.workload) + (other.setting == point.setting) + (other.group == point.group)

    most = max(map(likeness, spent), default=0)
    return max((seconds for other, seconds in spent.items() if likeness(other) == most), default=0.0)


def _spent(point: Point, study: Path, more: Sequence[str]) -> float | None:
    """Seconds that a finished point took, with start and end; None if it is not finished."""
    folder = study / "hardware" / point.name
    if not (folder / POINT).is_file():
        return None
    kept = json.loads((folder / POINT).read_text(encoding="utf-8"))
    before, now = kept.get("overrides"), [*point.overrides, *more]
    if before is not None and before != now:
        changed = " ".join(sorted(set(before) ^ set(now))) or "another order"
        raise SettingError(f"{folder} is finished, with other overrides ({changed}): give another -o, or move it away")
    return float(kept.get("seconds", json.loads((folder / "run.json").read_text(encoding="utf-8"))["spent"]["wall"]))


def _run(point: Point, folder: Path, more: Sequence[str], title: str) -> bool:
    """Whether it came to its end."""
    config = _config(point, more)
    config.run_dir = str(folder)
    _move_aside(folder)
    since = monotonic()
    try:
        folder.mkdir(parents=True)
        with clocks.recorded(folder / CLOCKS, str(config.backend.get("device")).startswith("cuda")):
            run.execute(config, title)
    except Exception as error:  # noqa: BLE001
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBLEM).write_text(f"{tell(error)}\n", encoding="utf-8")
        print(f"error: {point.name}: {tell(error)}", file=sys.stderr, flush=True)
        return False
    finally:
        _give_memory_back()
    kept = {"seconds": monotonic() - since, "overrides": [*point.overrides, *more]}
    provenance.write(folder / POINT, point.labels() | kept | _gpu(folder))
    return True


def _config(point: Point, more: Sequence[str]) -> DictConfig:
    """What does not compose is a wrong plan, not a point that fails."""
    try:
        return composed([*point.overrides, *more])
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        raise SettingError(f"{point.name}: {line}") from error


def _move_aside(folder: Path) -> None:
    """What an interrupted run left is no result, but may tell something."""
    number, aside = 1, folder.with_name(f"{folder.name}.interrupted")
    while folder.exists() and aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.interrupted-{number}")
    if folder.exists():
        folder.rename(aside)


def _give_memory_back() -> None:
    """The next engine counts what is free on its GPU: the one before must be gone, and torch's cache of it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _gpu(folder: Path) -> dict[str, Any]:
    """Name, driver and clocks of the first GPU, where one was used."""
    if not (found := clocks.summary(folder / CLOCKS)):
        return {}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    name, _, driver = told.partition("\n")[0].partition(", ")
    return {"gpu": name, "driver": driver, "clocks": found}
