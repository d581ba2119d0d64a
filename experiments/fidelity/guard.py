"""Recorded runs on hardware, kept small beside the simulator's errors on them: what today's simulator does worse shows.

A record is a folder: `hardware/NAME/` as a study has it, and `errors.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq

from analysis.fidelity import layers, study
from experiments import provenance
from experiments.fidelity.hardware import POINT, finished
from experiments.fidelity.twin import pair
from experiments.settings import SettingError
from playground.sim.cost.profile import shipped
from playground.trace import SCHEMAS, read

VERSION = 1
RECORDED = Path(__file__).parent / "recorded"
"""Records that ship: CI holds the simulator to them."""
ERRORS = "errors.json"
PATH, PROFILES = "backend.cost.path=", "{profiles}/"
KEPT = ("run.json", "config.yaml", POINT)
SLACK = 0.005
"""An error, as a share, that may be added: the same simulator always errs alike, but a mended one errs otherwise."""

Errors = dict[str, dict[str, float]]
"""By run and metric, shares of the hardware's figure. `steps`: mean of single steps' absolute errors; `decisions`: the
share of runs whose decisions were not identical, 0 or 1."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One error when it was recorded, and today's."""

    run: str
    metric: str
    recorded: float
    today: float

    @property
    def worse(self) -> bool:
        return abs(self.today) > abs(self.recorded) + SLACK


def record(given: Path, names: Sequence[str], out: Path, cost: Sequence[str]) -> Errors:
    """Keep some of a study's runs, all where `names` is empty, and what the simulator errs on them now.

    `cost`: overrides that choose the cost model, kept with the errors. `SettingError` if a run is not there, or `out`
    holds a record of other runs.
    """
    runs = {folder.name: folder for folder in finished(given)}
    for name in names:
        if name not in runs:
            raise SettingError(f"{name}: {given} has no such finished run; there are: {', '.join(runs) or 'none'}")
    chosen = list(names or runs)
    if not chosen:
        raise SettingError(f"{given / 'hardware'}: no finished run; make some with: run PLAN -o {given}")
    if others := sorted({folder.name for folder in finished(out)} - set(chosen)):
        raise SettingError(f"{out}: holds other runs ({', '.join(others)}); remove it or choose another")
    for name in chosen:
        _keep(runs[name], out / "hardware" / name)
    errors, file = measured(out, cost)
    if file:  # not any other that a machine has of the same model
        cost = [*(word for word in cost if not word.startswith(PATH)), f"{PATH}{_portable(file)}"]
    provenance.write(out / ERRORS, {"version": VERSION, "cost": list(cost), "errors": errors})
    return errors


def _portable(file: Path) -> str:
    """A path as a record keeps it: of files that ship, from where they are."""
    return f"{PROFILES}{file.relative_to(shipped()).as_posix()}" if file.is_relative_to(shipped()) else str(file)


def _keep(run: Path, place: Path) -> None:
    """What a twin is made of; tables as small as they get."""
    place.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        (place / name).write_bytes((run / name).read_bytes())
    for name in SCHEMAS:
        pq.write_table(read(run, name), place / f"{name}.parquet", compression="zstd", compression_level=19)


def measured(folder: Path, cost: Sequence[str]) -> tuple[Errors, Path | None]:
    """What the simulator errs on a record's runs now, rounded for who reads it; the file of the cost model, if any."""
    more = [word.replace(PROFILES, f"{shipped()}/") for word in cost]
    with TemporaryDirectory() as made:
        for number, run in enumerate(runs := finished(folder), 1):
            pair(run, Path(made), more, f"{number} of {len(runs)}: {run.name}")
        pairs = study.read(Path(made))
        found: Errors = {one.name: {"decisions": float(not one.about["parity"]["identical"])} for one in pairs}
        for row in layers.kernel(pairs):
            if row["kind"] == "all":
                found[row["name"]]["steps"] = round(row["mape"], 5)
        files = {Path(file) for one in pairs if (file := one.about["cost"]["file"])}
        for row in layers.trajectory(pairs):
            found[row["name"]][row["metric"]] = round(row["error"], 5)
    if len(files) > 1:
        raise SettingError(f"{folder}: its runs have several cost models; record those of one model and device alone")
    return found, next(iter(files), None)


def compared(folder: Path) -> list[Figure]:
    """Every error of a record, then and now. `SettingError` if it is none."""
    kept = _read(folder / ERRORS)
    today, _ = measured(folder, kept["cost"])
    then: Mapping[str, Mapping[str, float]] = kept["errors"]
    if missing := sorted(set(then) ^ set(today)):
        raise SettingError(f"{folder}: {ERRORS} and hardware/ hold different runs ({', '.join(missing)})")
    return [
        Figure(run, metric, value, today[run][metric])
        for run, errors in then.items()
        for metric, value in errors.items()
    ]


def _read(file: Path) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingError(f"{file.parent}: no record of runs: it has no {file.name}; make one with: record") from error
    if kept.get("version") != VERSION:
        raise SettingError(f"{file}: version {kept.get('version')}, and this reads {VERSION}: record it anew")
    return kept


def told(figures: Sequence[Figure]) -> str:
    """A table: one row a run, today's errors, `!` where one is worse than recorded; then those, one a line."""
    metrics = list(dict.fromkeys(figure.metric for figure in figures if not figure.metric.endswith("p99")))
    by_run: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        by_run.setdefault(figure.run, {})[figure.metric] = figure
    width = max(map(len, by_run), default=0)
    lines = [f"{'error today':{width}}" + "".join(f" {metric.replace('throughput', 'req/s'):>9}" for metric in metrics)]
    for run, found in by_run.items():
        shown = [f"{found[metric].today:+.1%}{'!' if found[metric].worse else ' '}" for metric in metrics]
        lines.append(f"{run:{width}}" + "".join(f" {value:>9}" for value in shown))
    worse = [figure for figure in figures if figure.worse]
    lines.append("")
    lines += [f"worse: {one.run} {one.metric}: {one.today:+.2%}, recorded {one.recorded:+.2%}" for one in worse]
    lines.append(
        f"{len(figures) - len(worse)} of {len(figures)} errors are no more than {SLACK:.1%} above the recorded"
    )
    return "\n".join(lines)
