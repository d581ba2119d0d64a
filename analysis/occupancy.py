"""How full the steps, the stages and the KV pool were. Knows no request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.tokens import Array

COPY_LANES = ("copy_in", "copy_out")


def step_metrics(steps: pd.DataFrame) -> dict[str, Any]:
    """Steps, tokens per step and its coefficient of variation."""
    if len(steps) == 0:
        return {"steps": 0, "mean_tokens_per_step": None, "cv_tokens_per_step": None}
    tokens, counts = tokens_per_step(steps)
    mean = float(np.average(tokens, weights=counts))
    spread = float(np.sqrt(np.average((tokens - mean) ** 2, weights=counts)))
    return {
        "steps": int(counts.sum()),
        "mean_tokens_per_step": mean,
        "cv_tokens_per_step": spread / mean if mean else None,
    }


def tokens_per_step(steps: pd.DataFrame) -> tuple[Array, Array]:
    """Tokens of each step over all of its lanes, and how often it was repeated."""
    total = steps["prefill_tokens"] + steps["decode_tokens"]
    rows = steps.assign(tokens=total).groupby("step", sort=False).agg({"tokens": "sum", "count": "max"})
    return rows["tokens"].to_numpy(), rows["count"].to_numpy()


def kv_usage(steps: pd.DataFrame, blocks: int) -> pd.DataFrame:
    """One row a step: group, time (seconds), used (share of the pool), and for how long that lasted."""
    rows = steps.sort_values(["group", "planned", "step"], kind="stable")
    until = rows.groupby("group")["planned"].shift(-1).fillna(rows["finished"])
    return pd.DataFrame(
        {
            "group": rows["group"],
            "time": rows["planned"],
            "used": 1 - rows["blocks_free"] / blocks,
            "lasted": (until - rows["planned"]).clip(lower=0.0),
        }
    )


def kv_metrics(steps: pd.DataFrame, blocks: int) -> dict[str, float | None]:
    """KV use: time-weighted mean, and peak."""
    usage = kv_usage(steps, blocks)
    if usage["lasted"].sum() == 0:
        return _no_kv()
    mean = float(np.average(usage["used"], weights=usage["lasted"]))
    return {"mean_kv_usage": mean, "max_kv_usage": float(usage["used"].max())}


def busy_time(steps: pd.DataFrame) -> tuple[int, float]:
    """Stages of one group, and the seconds they were busy, all stages added up; lanes side by side count once.

    Copies do not keep a stage busy.
    """
    steps = steps[~steps["lane"].isin(COPY_LANES)]
    staged = steps[steps["stage_started"].notna()]
    if len(staged) == 0:
        return 1, covered(steps["started"].to_numpy(), steps["finished"].to_numpy())
    started = np.stack(staged["stage_started"].to_numpy())
    finished = np.stack(staged["stage_finished"].to_numpy())
    stages = started.shape[1]
    return stages, sum(covered(started[:, stage], finished[:, stage]) for stage in range(stages))


def covered(started: Array, finished: Array) -> float:
    """Length of the union of intervals, in seconds."""
    if len(started) == 0:
        return 0.0
    order = np.argsort(started, kind="stable")
    started, finished = started[order], np.maximum.accumulate(finished[order])
    # Where an interval begins after all earlier ones ended there is a hole, which nothing covers.
    holes = np.clip(started[1:] - finished[:-1], 0.0, None).sum()
    return float(finished[-1] - started[0] - holes)


def _no_kv() -> dict[str, float | None]:
    return {"mean_kv_usage": None, "max_kv_usage": None}
