"""Merged steps taken apart: one row for every repetition, with its own times and its own free blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.tokens import Array


def apart(steps: pd.DataFrame, slices: pd.DataFrame, block_size: int) -> pd.DataFrame:
    """`steps` with a row for each repetition. Rows of the same step stay neighbours, in order of time.

    A repetition is planned when the trace says it was `decided`, else when the one before is finished, and starts a
    launch later (`host`), or when the first stage is free. Blocks are taken where a decode's position begins one, and
    by all that run in turns. Cost: linear in repetitions and in the blocks that they take, but for one sort.
    """
    if len(steps) == 0 or (steps["count"] == 1).all():
        return steps
    counts = steps["count"].to_numpy()
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # where each row's repetitions begin
    rows = steps.loc[steps.index.repeat(counts)].reset_index(drop=True)
    later = np.ones(len(rows), dtype=bool)
    later[first] = False
    merged = counts > 1
    ends = _flat(steps, "ticks", merged, rows["finished"])
    before = np.concatenate([[0.0], ends[:-1]])
    planned = _flat(steps, "decided", steps["decided"].notna().to_numpy(), np.where(later, before, rows["planned"]))
    rows = rows.assign(planned=planned, finished=ends)
    rows["launched"] = _launched(rows, later)
    started = np.where(later, before + rows["host"].to_numpy(), rows["started"])
    if (staged := rows["stage_started"].notna().to_numpy()).any():
        for name in ("stage_started", "stage_finished"):
            rows[name] = _by_stage(steps[name], counts)
        started[staged] = [times[0] for times in rows["stage_started"][staged]]
        if len(rows["stage_started"][staged].iloc[0]) == 1:
            rows = rows.assign(stage_started=None, stage_finished=None)
    return rows.assign(started=started, blocks_free=_free(rows, later, _taken(steps, slices, block_size, first)))


def _launched(rows: pd.DataFrame, later: Array) -> Array:
    """Each group's host plans one step after another: a repetition when it is decided, or the one before launched."""
    launched: Array = rows["launched"].to_numpy(dtype=float, copy=True)
    host = np.where(later, rows["host"], 0.0)
    begins = np.where(later, rows["planned"], launched)
    order = np.lexsort((np.arange(len(rows)), rows["planned"]))
    for group in rows["group"].unique():
        mine = order[(rows["group"] == group).to_numpy()[order]]
        spent = np.cumsum(host[mine])
        # launched = max(begins, the launch before) + host, with what is spent by then taken off both sides
        launched[mine] = np.maximum.accumulate(begins[mine] - (spent - host[mine])) + spent
    return launched


def _flat(steps: pd.DataFrame, name: str, listed: Array, otherwise: Array | pd.Series) -> Array:
    """A number for each repetition: from the rows' lists where they are `listed`."""
    flat = np.array(otherwise, dtype=float)
    if listed.any():
        flat[np.repeat(listed, steps["count"].to_numpy())] = np.concatenate(steps[name].to_numpy()[listed])
    return flat


def _by_stage(times: pd.Series, counts: Array) -> list[Array | None]:
    parts: list[Array | None] = []
    for row, count in zip(times, counts, strict=True):
        parts += [None] * count if row is None else list(np.reshape(row, (count, -1)))
    return parts


def _free(rows: pd.DataFrame, later: Array, taken: Array) -> Array:
    """Free blocks after each repetition: what a group's last row that says so had, less what was taken since."""
    order = np.lexsort((np.arange(len(rows)), rows["planned"], rows["group"]))
    known = rows["blocks_free"].to_numpy()[order]
    gone = np.cumsum(np.where(later, taken, 0)[order])
    last = np.maximum.accumulate(np.where(later[order], 0, np.arange(len(rows))))
    free = np.empty(len(rows), dtype=known.dtype)
    free[order] = known[last] + gone[last] - gone
    return free


def _taken(steps: pd.DataFrame, slices: pd.DataFrame, block_size: int, first: Array) -> Array:
    """Blocks that each repetition takes; of the first ones, nothing."""
    counts = steps["count"].to_numpy()
    place = pd.Series(np.arange(len(steps)), index=steps["step"].to_numpy())
    merged = slices[slices["step"].isin(steps["step"].to_numpy()[counts > 1])]
    row = place.loc[merged["step"].to_numpy()].to_numpy()
    start = merged["start"].to_numpy()
    crossing = block_size - start % block_size  # the first repetition that begins a block
    number = np.maximum((counts[row] - 1 - crossing) // block_size + 1, 0)
    nth = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    at = np.repeat(first[row] + crossing, number) + nth * block_size
    return np.bincount(at, minlength=counts.sum())
