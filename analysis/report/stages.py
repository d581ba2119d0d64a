"""Stages of a run over time: at work on what, idle for which cause; in shares of columns, and step by step if few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis import bubbles
from analysis.metrics import Tables
from analysis.occupancy import COPY_LANES
from analysis.tokens import Array

COLUMNS = 500
"""Of a stage's picture."""
MOST_SPANS = 4000
"""Steps that are drawn one by one; of longer runs only columns are."""
BUSY = ("prefill", "mixed", "decode")


def stages(tables: Tables) -> list[dict[str, Any]]:
    """Of each group and stage: `shares` of `COLUMNS` columns from `begin` to `end` (seconds), by kind of work and cause
    of idleness; if steps are few, `spans` (begin, end, kind, step, prefill and decode tokens, place in `lanes`) and
    `holes` (begin, end, cause)."""
    work = tables.repetitions[~tables.repetitions["lane"].isin(COPY_LANES)]
    if not len(work):
        return []
    idle = bubbles.idle_parts(tables.requests, tables.steps, tables.repetitions, tables.looks)
    edges = np.linspace(min([*work["planned"], *idle["begin"]]), max([*work["finished"], *idle["end"]]), COLUMNS + 1)
    return [
        _stage(group, stage, spans, idle[(idle["group"] == group) & (idle["stage"] == stage)], edges)
        for (group, stage), spans in _spans(work).items()
    ]


def _stage(group: int, stage: int, spans: pd.DataFrame, holes: pd.DataFrame, edges: Array) -> dict[str, Any]:
    work = _side_by_side(spans)
    shares = {kind: covered(part["begin"], part["end"], edges) for kind, part in work.groupby("kind")}
    shares |= {str(cause): covered(part["begin"], part["end"], edges) for cause, part in holes.groupby("cause")}
    single = len(spans) <= MOST_SPANS
    lanes = sorted(spans["lane"].unique(), key=lambda lane: (lane != "main", lane))
    return {
        "group": group,
        "stage": stage,
        "begin": float(edges[0]),
        "end": float(edges[-1]),
        "lanes": lanes,
        "shares": {name: [float(f"{value:.4g}") for value in values] for name, values in shares.items()},
        "spans": [_span(row, lanes) for row in (spans if single else spans[:0]).itertuples()],
        "holes": [
            [_micro(row.begin), _micro(row.end), str(row.cause)]
            for row in (holes if single else holes[:0]).itertuples()
        ],
    }


def _span(row: Any, lanes: list[str]) -> list[float]:
    kind, lane = BUSY.index(row.kind), lanes.index(row.lane)
    return [_micro(row.begin), _micro(row.end), kind, int(row.step), int(row.prefill), int(row.decode), lane]


def _micro(seconds: float) -> float:
    return round(float(seconds), 7)


def _spans(work: pd.DataFrame) -> dict[tuple[int, int], pd.DataFrame]:
    """Steps on each stage: begin, end, kind, step, prefill and decode tokens."""
    kind = np.where(work["prefill_tokens"] == 0, "decode", np.where(work["decode_tokens"] == 0, "prefill", "mixed"))
    rows = pd.DataFrame(
        {
            "kind": kind, "step": work["step"].to_numpy(), "lane": work["lane"].to_numpy(),
            "prefill": work["prefill_tokens"].to_numpy(), "decode": work["decode_tokens"].to_numpy(),
        }
    )  # fmt: skip
    found = {}
    for stage, (begin, end) in enumerate(bubbles.spans(work)):
        for group in sorted(work["group"].unique()):
            mine = rows.assign(begin=begin, end=end)[(work["group"] == group).to_numpy()]
            found[int(group), stage] = mine.sort_values("begin", kind="stable")
    return found


def covered(begin: pd.Series, end: pd.Series, edges: Array) -> Array:
    """The share of each column that disjoint stretches cover."""
    if not len(begin):
        return np.zeros(len(edges) - 1)
    stretches = bubbles.Intervals(np.sort(begin.to_numpy(float)), np.sort(end.to_numpy(float)))
    return np.clip(stretches.within(edges[:-1], edges[1:]) / np.diff(edges), 0.0, 1.0)


def _side_by_side(spans: pd.DataFrame) -> pd.DataFrame:
    """Disjoint stretches of work: begin, end, kind. Prompts on one lane while decodes are on another are mixed."""
    prompts = (spans["kind"] != "decode").to_numpy(int)
    decodes = (spans["kind"] != "prefill").to_numpy(int)
    times = np.concatenate([spans["begin"], spans["end"]])
    order = np.argsort(times, kind="stable")
    times = times[order]
    active = [np.cumsum(np.concatenate([one, -one])[order])[:-1] > 0 for one in (prompts, decodes)]
    kind = np.where(active[0] & active[1], "mixed", np.where(active[0], "prefill", "decode"))
    there = (active[0] | active[1]) & (times[1:] > times[:-1])
    return pd.DataFrame({"begin": times[:-1][there], "end": times[1:][there], "kind": kind[there]})
