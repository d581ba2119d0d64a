"""The runs of a map, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments.composing import composed
from experiments.regimes.grid import POLICIES, REFERENCE, Cell, Grid, Place
from experiments.settings import SettingError
from experiments.trials import Overrides, Progress, Trial, Trials

KEYS = ("mean_e2el_ms", "p90_ttft_ms", "p90_tpot_ms")
ALL_AT_ONCE = "workload.rate=inf"
VERSION = 1


def surveyed(
    grid: Grid,
    base: Overrides,
    requests: int,
    seeds: int,
    trials: Trials,
    progress: Progress = lambda done, total: None,
    policies: Mapping[str, Overrides] = POLICIES,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The map as data: capacities by place, and by cell and policy the figures of each seed.

    Raises SettingError where a run fails or turns requests away.
    """
    common = (*base, f"workload.requests={requests}")
    composed([*common, *grid.places[0].overrides, *next(iter(policies.values()))])
    tell(f"capacity of {len(grid.places)} settings")
    rates = _capacities(grid, common, trials, progress)
    runs = {
        (cell, policy, seed): (
            *common,
            *cell.place.overrides,
            f"workload.rate={cell.load * rates[cell.place]:.4g}",
            *chosen,
            f"seed={seed}",
        )
        for cell in grid.cells()
        for policy, chosen in policies.items()
        for seed in range(seeds)
    }
    tell(f"{len(runs)} runs of {len(list(grid.cells()))} cells, {len(policies)} policies, {seeds} seeds")
    found = dict(zip(runs, map(_served, trials.run(list(runs.values()), progress)), strict=True))
    cells = [_cell(cell, rates[cell.place], policies, range(seeds), found) for cell in grid.cells()]
    return {
        "version": VERSION,
        "base": list(base),
        "requests": requests,
        "seeds": seeds,
        "policies": {name: list(chosen) for name, chosen in policies.items()},
        "cells": cells,
    }


def _capacities(grid: Grid, common: Overrides, trials: Trials, progress: Progress) -> dict[Place, float]:
    """Requests a second of the reference policy, all of them there at once."""
    wanted = [(*common, *place.overrides, ALL_AT_ONCE, *REFERENCE, "seed=0") for place in grid.places]
    found = map(_served, trials.run(wanted, progress))
    return {place: float(trial.summary["request_throughput"]) for place, trial in zip(grid.places, found, strict=True)}


def _served(trial: Trial) -> Trial:
    if trial.problem:
        raise SettingError(f"{' '.join(trial.overrides)}: {trial.problem}")
    if trial.summary["rejected"]:
        raise SettingError(f"{' '.join(trial.overrides)}: {trial.summary['rejected']} requests were turned away")
    return trial


def _cell(
    cell: Cell,
    rate: float,
    policies: Mapping[str, Overrides],
    seeds: Sequence[int],
    found: Mapping[tuple[Cell, str, int], Trial],
) -> dict[str, Any]:
    figures = {
        key: {policy: [round(found[cell, policy, seed].summary[key], 3) for seed in seeds] for policy in policies}
        for key in KEYS
    }
    return asdict(cell.place) | {"load": cell.load, "rate": round(cell.load * rate, 4), "figures": figures}
