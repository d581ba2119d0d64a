"""Time lines of a run: what holds at each instant, thinned to windows that keep mean, least and most.

Between two decisions a queue, the KV in use and the batch are what the last decision left; when nobody is in the system
they are nothing. So a window's mean is over time, and a peak shorter than a window still shows in its most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.bubbles import presence
from analysis.metrics import Tables
from analysis.occupancy import COPY_LANES
from analysis.tokens import Array

LOSSES = ("recompute", "swap")
"""Events with which a request loses its KV."""
STEP = ("prefill", "decode", "ms")
"""What a step is told by."""


@dataclass(frozen=True, slots=True)
class Level:
    """A quantity that keeps its value until it changes: `values[i]` from `times[i]` on, which rise, and 0 before."""

    times: Array
    values: Array

    @classmethod
    def of(cls, times: Array, values: Array) -> Level:
        """In any order; of equal times the last one holds."""
        order = np.argsort(times, kind="stable")
        times, values = np.asarray(times, float)[order], np.asarray(values, float)[order]
        last = np.append(times[1:] > times[:-1], True)[: len(times)]
        return cls(times[last], values[last])

    def zero_after(self, ends: Array) -> Level:
        """0 from each of `ends` on, until the next change; a change at an end itself stays."""
        return Level.of(np.concatenate([ends, self.times]), np.concatenate([np.zeros(len(ends)), self.values]))

    def at(self, times: Array) -> Array:
        found: Array = np.concatenate([[0.0], self.values])[np.searchsorted(self.times, times, side="right")]
        return found


@dataclass(frozen=True, slots=True)
class Line:
    """Of each window: the mean over its time, and the least and most that held for any part of it."""

    mean: Array
    least: Array
    most: Array


def total(levels: Sequence[Level]) -> Level:
    """Of several at each instant."""
    times = np.concatenate([level.times for level in levels])
    steps = np.concatenate([np.diff(level.values, prepend=0.0) for level in levels])
    order = np.argsort(times, kind="stable")
    return Level.of(times[order], np.cumsum(steps[order]))


def line(level: Level, edges: Array) -> Line:
    """Windows between neighbouring `edges`. Linear but for the search."""
    begin = edges[:-1]
    # Each window's values: what holds at its begin, and what comes within it.
    first = np.searchsorted(level.times, begin, side="left")
    within = np.searchsorted(level.times, edges[-1], side="left")
    values = np.insert(level.values[: max(within, first[-1])], first, level.at(begin))
    places = first + np.arange(len(begin))
    least, most = (how.reduceat(values, places) for how in (np.minimum, np.maximum))
    mean = np.diff(_integral(level, edges)) / np.diff(edges)
    return Line(np.clip(mean, least, most), least, most)  # but for rounding it lies between them


def _integral(level: Level, until: Array) -> Array:
    """Over time from the first change on."""
    if not len(level.times):
        return np.zeros(len(until))
    before = np.concatenate([[0.0], np.cumsum(level.values[:-1] * np.diff(level.times))])
    place = np.searchsorted(level.times, until, side="right") - 1
    inside = np.maximum(place, 0)
    found: Array = np.where(place >= 0, before[inside] + level.values[inside] * (until - level.times[inside]), 0.0)
    return found


def each(levels: Sequence[Level], edges: Array) -> Line:
    """Of one of several like things: the mean of all, the least and most of any."""
    lines = [line(level, edges) for level in levels]
    return Line(
        np.mean([one.mean for one in lines], axis=0),
        np.min([one.least for one in lines], axis=0),
        np.max([one.most for one in lines], axis=0),
    )


def rate(begin: Array, end: Array, amount: Array, edges: Array) -> Array:
    """Of each window, a second: `amount` spread evenly from `begin` to `end`, or at once where they are one instant."""
    windows = len(edges) - 1
    first = np.clip(np.searchsorted(edges, begin, side="right") - 1, 0, windows - 1)
    last = np.clip(np.searchsorted(edges, end, side="left") - 1, first, windows - 1)
    counts = last - first + 1
    who = np.repeat(np.arange(len(begin)), counts)
    window = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
    length = (end - begin)[who]
    inside = np.minimum(end[who], edges[window + 1]) - np.maximum(begin[who], edges[window])
    share = np.divide(np.maximum(inside, 0.0), length, out=np.ones(len(who)), where=length > 0)
    found: Array = np.bincount(window, amount[who] * share, minlength=windows) / np.diff(edges)
    return found


# --- of a run


def span(tables: Tables) -> tuple[float, float]:
    """Seconds of the first arrival or launch, and of the last end; (0, 1) of a run in which nothing happened."""
    work, requests = tables.repetitions, tables.requests
    begin = min([*requests["arrival"], *work["launched"]], default=0.0)
    end = max([*requests["finished"], *work["finished"]], default=1.0)
    return float(begin), float(max(end, np.nextafter(begin, np.inf)))


def timelines(
    tables: Tables, queues: pd.DataFrame, losses: Array, edges: Array, lingering: float = np.inf
) -> dict[str, Line]:
    """Lines by name, none where no step was taken.

    Of all replicas: waiting, running (requests), prefill_rate, decode_rate (tokens a second), preemptions (a window).
    Of any replica: kv (share of its pool), prefill, decode (tokens of the step that began last), ms (how long it took).

    `queues`: step, lane, waiting and running of the trace's steps. `losses`: when requests lost their KV, in seconds.
    `lingering`: since when somebody was there that had not ended when the trace did.
    """
    work = tables.repetitions.merge(queues.drop_duplicates(["step", "lane"]), on=["step", "lane"], how="left")
    groups = sorted(work["group"].unique())
    if not groups:
        return {}
    parts = [_levels(tables, work, group if len(groups) > 1 else None, lingering) for group in groups]
    lines = {name: line(total([part[name] for part in parts]), edges) for name in ("waiting", "running")}
    lines |= {name: each([part[name] for part in parts], edges) for name in ("kv", *STEP)}
    begin, end = work["started"].to_numpy(float), work["finished"].to_numpy(float)
    amounts = {
        f"{kind}_rate": rate(begin, end, work[f"{kind}_tokens"].to_numpy(float), edges)
        for kind in ("prefill", "decode")
    }
    amounts["preemptions"] = np.histogram(losses, edges)[0].astype(float)
    return lines | {name: Line(values, values, values) for name, values in amounts.items()}


def _levels(tables: Tables, work: pd.DataFrame, group: int | None, lingering: float) -> dict[str, Level]:
    """Of one group of ranks (None: the only one): what its last decision left, and the step that began last."""
    served = tables.requests[tables.requests["outcome"] != "rejected"]
    mine = work if group is None else work[work["group"] == group]
    theirs = served if group is None else served[served["rank"] == group]
    ends = presence(theirs, mine).end
    decided = mine.sort_values(["planned", "step"], kind="stable")
    states = {
        "waiting": decided["waiting"],
        "running": decided["running"],
        "kv": 1 - decided["blocks_free"] / tables.blocks,
    }
    found = {name: Level.of(decided["planned"].to_numpy(), values.to_numpy()) for name, values in states.items()}
    steps = _steps(mine)
    found |= {name: Level.of(steps["started"].to_numpy(), steps[name].to_numpy()) for name in STEP}
    return {name: level.zero_after(ends[ends < lingering]) for name, level in found.items()}


def _steps(work: pd.DataFrame) -> pd.DataFrame:
    """A row for each repetition, its lanes together: side by side they are one batch."""
    rows = work[~work["lane"].isin(COPY_LANES)]
    rows = rows.assign(tick=rows.groupby(["step", "lane"], sort=False).cumcount())
    found = rows.groupby(["step", "tick"], sort=False).agg(
        started=("started", "min"), finished=("finished", "max"), prefill=("prefill_tokens", "sum"),
        decode=("decode_tokens", "sum"),
    )  # fmt: skip
    return found.assign(ms=(found["finished"] - found["started"]) * 1e3)
