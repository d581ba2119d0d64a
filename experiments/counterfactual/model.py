"""How far the cost model is off, step by step, on the very stretch that it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from analysis.fidelity.layers import step_errors
from experiments.build import Simulated, make, plan_of, setting
from experiments.fidelity.predict import predict
from experiments.settings import SettingError, read
from playground.sim.cost import CostModel


def cost_model(config: DictConfig, chosen: bool) -> CostModel:
    """A twin's. `chosen`: whether the user named it. `SettingError` if there is none."""
    settings = read(config)
    backend: Simulated = make("backend", settings.backend, Simulated)
    try:
        with setting("backend"):
            return backend.cost_model(plan_of(settings))
    except SettingError as error:
        if chosen:
            raise
        raise SettingError(f"{error}; or take another cost model, as --cost roofline (bounds, not measured)") from error


def off(run: Path, cost: CostModel, at: int, file: Path) -> list[dict[str, Any]]:
    """Errors of the recorded steps from `at` on, all and by kind, as `analysis fidelity` has them, and the host's gaps.

    Writes every step's prediction (docs/fidelity.md) to `file`. Rows have `kind`, `steps` and shares `mape`, `bias`,
    `total`...; of kind `host` only `measured` and `predicted` seconds. None where no step's time is its own (lockstep).
    """
    predict(run, cost, file)
    steps = pd.read_parquet(file)
    steps = steps[steps["step"] >= at]
    if steps.empty:
        return []
    rows: list[dict[str, Any]] = [{"kind": "all"} | step_errors(steps)]
    rows += [{"kind": str(kind)} | step_errors(part) for kind, part in steps.groupby("kind")]
    gaps = steps.dropna(subset=["gap_measured"])
    if len(gaps):
        seconds = {name: float(gaps[f"gap_{name}"].sum()) for name in ("measured", "predicted")}
        rows.append({"kind": "host", "steps": len(gaps), **seconds})
    return rows


def told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For a terminal."""
    if not rows:
        return ["steps: the model cannot be held to single ones here (ranks in lockstep)"]
    lines = []
    for row in rows:
        if row["kind"] == "host":
            lines.append(
                f"host between steps: {row['measured'] * 1e3:,.1f} ms recorded, {row['predicted'] * 1e3:,.1f} ms "
                f"predicted ({row['steps']:,} times)"
            )
        elif row["kind"] != "all" or len(rows) > 3:
            lines.append(
                f"{row['kind']:7} steps: off by {row['mape']:.1%} on average, {row['total']:+.1%} in sum "
                f"({row['steps']:,} steps)"
            )
    return lines
