"""When each token was returned: joins the slices that sampled with the steps that carried them. Knows no policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]


def token_times(requests: pd.DataFrame, steps: pd.DataFrame, slices: pd.DataFrame) -> pd.DataFrame:
    """One row a returned token: sequence, index (0 is the first output token), time in seconds.

    A merged row (`count` > 1) stands for that many tokens in a row, one at each tick.
    """
    steps = steps.reset_index(drop=True)
    sampled = slices[slices["samples"]].merge(_row_numbers(steps), on=["step", "lane"])
    ticks, first = _flat_ticks(steps)
    rows = sampled["row"].to_numpy()
    counts = steps["count"].to_numpy()[rows]
    within = _ranges(counts)
    tokens = pd.DataFrame(
        {
            "sequence": np.repeat(sampled["sequence"].to_numpy(), counts),
            "position": np.repeat((sampled["start"] + sampled["length"]).to_numpy(), counts) + within,
            "time": ticks[np.repeat(first[rows], counts) + within],
        }
    )
    return _returned(tokens, requests)


def gaps(tokens: pd.DataFrame) -> Array:
    """Seconds between successive chunks of one request, pooled over all of them (tokens of one step are one chunk)."""
    chunks = tokens.drop_duplicates(["sequence", "time"])
    return np.asarray(chunks.groupby("sequence", sort=False)["time"].diff().dropna().to_numpy())


def _row_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    return steps[["step", "lane"]].assign(row=np.arange(len(steps)))


def _flat_ticks(steps: pd.DataFrame) -> tuple[Array, Array]:
    """All finish times in one array, and where each row's begin."""
    counts = steps["count"].to_numpy()
    first = np.cumsum(counts) - counts
    flat = np.empty(int(counts.sum()))
    flat[first] = steps["finished"].to_numpy()
    merged = counts > 1
    if merged.any():
        ticks = np.concatenate(steps["ticks"].to_numpy()[merged])
        flat[np.repeat(first[merged], counts[merged]) + _ranges(counts[merged])] = ticks
    return flat, first


def _ranges(counts: Array) -> Array:
    """0..c-1 for every c, one after another."""
    ends = np.cumsum(counts)
    numbers: Array = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return numbers


def _returned(tokens: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Without the tokens nobody got: those of a preempted epoch, computed again later, and those past a late end."""
    lengths = requests[["id", "prompt_length", "output_length"]].rename(columns={"id": "sequence"})
    tokens = tokens.merge(lengths, on="sequence")
    tokens["index"] = tokens["position"] - tokens["prompt_length"]
    tokens = tokens[(tokens["index"] >= 0) & (tokens["index"] < tokens["output_length"])]
    tokens = tokens.drop_duplicates(["sequence", "index"], keep="last")
    return tokens.sort_values(["sequence", "index"])[["sequence", "index", "time"]].reset_index(drop=True)
