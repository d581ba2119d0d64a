"""A run's steps thinned to a bounded number of windows: what a dashboard can show without drowning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.metrics import group_blocks
from playground import trace

COLUMNS = (
    "planned", "started", "finished", "prefill_tokens", "decode_tokens", "waiting", "running", "blocks_free",
    "preempted", "count",
)  # fmt: skip


def read(run_dir: Path, most: int = 1000) -> pd.DataFrame:
    """The windows of a run folder."""
    return windows(trace.read(run_dir, "steps", list(COLUMNS)).to_pandas(), group_blocks(run_dir), most)


def windows(steps: pd.DataFrame, blocks: int, most: int = 1000) -> pd.DataFrame:
    """At most so many rows, one a window of equal length in which a step ended.

    Columns: time (end of the window, seconds), steps, prefill_tokens and decode_tokens (both per second),
    tokens_per_step, step_ms (mean), waiting, running and kv_usage (means), preempted (sum).
    """
    if len(steps) == 0:
        return pd.DataFrame()
    begin, end = steps["planned"].min(), steps["finished"].max()
    width = (end - begin) / most or 1.0
    number = np.minimum(((steps["finished"] - begin) / width).astype(int), most - 1)
    rows = _sums(steps, blocks).groupby(number).sum()
    lanes = rows.pop("lanes")
    return pd.DataFrame(
        {
            "time": begin + (rows.index + 1) * width,
            "steps": rows["count"],
            "prefill_tokens_per_s": rows["prefill_tokens"] / width,
            "decode_tokens_per_s": rows["decode_tokens"] / width,
            "tokens_per_step": (rows["prefill_tokens"] + rows["decode_tokens"]) / rows["count"],
            "step_ms": rows["seconds"] / rows["count"] * 1e3,
            "waiting": rows["waiting"] / lanes,
            "running": rows["running"] / lanes,
            "kv_usage": rows["used"] / lanes,
            "preempted": rows["preempted"],
        }
    ).reset_index(drop=True)


def _sums(steps: pd.DataFrame, blocks: int) -> pd.DataFrame:
    """What adds up over the steps of a window; a merged row stands for `count` steps."""
    return pd.DataFrame(
        {
            "count": steps["count"],
            "lanes": 1,
            "prefill_tokens": steps["prefill_tokens"] * steps["count"],
            "decode_tokens": steps["decode_tokens"] * steps["count"],
            "seconds": steps["finished"] - steps["started"],
            "waiting": steps["waiting"],
            "running": steps["running"],
            "used": 1 - steps["blocks_free"] / blocks,
            "preempted": steps["preempted"],
        }
    )
