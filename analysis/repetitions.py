"""Merged steps taken apart: one row for every repetition, with its own times and its own free blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.tokens import Array


def apart(steps: pd.DataFrame, slices: pd.DataFrame, block_size: int) -> pd.DataFrame:
    """`steps` with a row for each repetition. Rows of the same step stay neighbours, in order of time.

    A repetition is planned when the one before is finished, and starts a launch later (`host`). Blocks are taken where
    a decode's position begins one. Cost: linear in repetitions and in the blocks that they take.
    """
    if len(steps) == 0 or (steps["count"] == 1).all():
        return steps
    counts = steps["count"].to_numpy()
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # where each row's repetitions begin
    rows = steps.loc[steps.index.repeat(counts)].reset_index(drop=True)
    later = np.ones(len(rows), dtype=bool)
    later[first] = False
    ends = rows["finished"].to_numpy().copy()
    merged = counts > 1
    inside = np.repeat(merged, counts)
    ends[inside] = np.concatenate(steps["ticks"].to_numpy()[merged])
    before = np.concatenate([[0.0], ends[:-1]])
    host = rows["host"].to_numpy()
    return rows.assign(
        planned=np.where(later, before, rows["planned"]),
        started=np.where(later, before + host, rows["started"]),
        finished=ends,
        blocks_free=rows["blocks_free"].to_numpy() - _taken(steps, slices, block_size, first),
    )


def _taken(steps: pd.DataFrame, slices: pd.DataFrame, block_size: int, first: Array) -> Array:
    """Blocks that the repetitions of each row have taken by then, beyond what its first one took."""
    counts = steps["count"].to_numpy()
    place = pd.Series(np.arange(len(steps)), index=steps["step"].to_numpy())
    merged = slices[slices["step"].isin(steps["step"].to_numpy()[counts > 1])]
    row = place.loc[merged["step"].to_numpy()].to_numpy()
    start = merged["start"].to_numpy()
    crossing = block_size - start % block_size  # the first repetition that begins a block
    number = np.maximum((counts[row] - 1 - crossing) // block_size + 1, 0)
    nth = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    at = np.repeat(first[row] + crossing, number) + nth * block_size
    taken = np.cumsum(np.bincount(at, minlength=counts.sum()))
    return np.asarray(taken - np.repeat(taken[first] - np.bincount(at, minlength=counts.sum())[first], counts))
