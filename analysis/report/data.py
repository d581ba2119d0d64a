"""What a report's page shows, as plain data: thinned so that a run of any length is a page of some hundred kilobytes.

Distributions are quantiles, time lines are windows, stages are shares of columns of time; nothing is a sample of single
requests, so that what is rare is not lost by chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import bubbles, curves, lint
from analysis.metrics import Tables, latencies, load, summarize
from analysis.occupancy import COPY_LANES
from analysis.repetitions import apart
from analysis.tokens import Array, gaps, token_times
from playground import trace

QUANTILES = np.unique(np.concatenate([np.linspace(0, 0.9, 181), 1 - np.geomspace(0.1, 1e-4, 120), [1.0]]))
"""Denser towards the tail."""
WINDOWS = 600
"""Of a time line."""
COLUMNS = 500
"""Of a stage's picture."""
MOST_SPANS = 4000
"""Steps that are drawn one by one; of longer runs only columns are."""
BUSY = ("prefill", "mixed", "decode")
FIGURES = (
    "completed", "request_throughput", "output_throughput", "preemptions", "wasted_tokens", "prefix_hit_rate",
    "mean_kv_usage", "max_kv_usage", "bubble_ratio",
)  # fmt: skip
STATISTICS, METRICS = ("mean", "p50", "p90", "p99"), ("ttft", "tpot", "itl", "e2el")
SHOWN = (*FIGURES[:3], *(f"{one}_{name}_ms" for name in METRICS for one in STATISTICS), *FIGURES[3:])


@dataclass(frozen=True, slots=True)
class One:
    """A run: its name, what it was of, its figures, and what its charts are drawn from."""

    name: str
    about: dict[str, Any]
    summary: dict[str, Any]
    cdfs: dict[str, list[list[float | None]]]
    lines: dict[str, list[float | None]]
    stages: list[dict[str, Any]]
    findings: list[dict[str, Any]]


def runs_of(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those of a sweep's points, in their order. `ValueError` if neither."""
    if _is_run(folder):
        return [folder]
    points = [child for child in folder.iterdir() if _is_run(child)] if folder.is_dir() else []
    if not points:
        raise ValueError(
            f"{folder}: neither the folder of a run nor of a sweep: it has no requests.parquet, nor has any below"
        )
    return sorted(points, key=lambda point: (len(point.name), point.name) if point.name.isdigit() else (99, point.name))


def _is_run(folder: Path) -> bool:
    return any((folder / f"requests.{kind}").is_file() for kind in ("parquet", "arrows"))


def read(folder: Path, name: str, whole: bool) -> One:
    """`whole`: with time lines and stages; of a sweep's points only distributions are drawn."""
    tables = load(folder)
    finished = latencies(tables.requests[tables.requests["outcome"] == "finished"])
    summary = summarize(tables)
    found = lint.lint(lint.read(folder)) if len(tables.requests) else []
    return One(
        name,
        _about(folder),
        {key: summary.get(key) for key in SHOWN},
        _cdfs(finished, tables),
        _lines(folder, tables) if whole else {},
        _stages(tables) if whole else [],
        [asdict(finding) for finding in found],
    )


def _about(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    described = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kept = ("backend", "device", "model", "seed", "started_at", "revision", "ended")
    policy = described.get("policy") or {}
    budget = policy.get("budget") if isinstance(policy.get("budget"), dict) else policy
    told = str((budget or {}).get("_target_", "")).rpartition(".")[2]
    return {name: described.get(name) for name in kept} | {"policy": told, "folder": str(folder)}


def _cdfs(finished: pd.DataFrame, tables: Tables) -> dict[str, list[list[float | None]]]:
    """[milliseconds, share] by metric."""
    tokens = token_times(tables.requests, tables.steps, tables.slices)
    samples = {name: finished[name].dropna().to_numpy() for name in ("ttft", "tpot", "e2el")}
    samples["itl"] = gaps(tokens[tokens["sequence"].isin(finished["id"])])
    return {name: _cdf(values) for name, values in samples.items() if len(values)}


def _cdf(values: Array) -> list[list[float | None]]:
    shares = QUANTILES if len(values) > len(QUANTILES) else (np.arange(len(values)) + 1) / len(values)
    return [[_short(at * 1e3), _short(share)] for at, share in zip(np.quantile(values, shares), shares, strict=True)]


def _lines(folder: Path, tables: Tables) -> dict[str, list[float | None]]:
    """Windows of equal length, merged steps taken apart: they would all fall into the window of their end."""
    steps = trace.read(folder, "steps").to_pandas()
    rows = apart(steps, tables.slices, tables.block_size)
    rows = rows.assign(count=1, preempted=rows["preempted"].where(~rows.duplicated(["step", "lane"]), 0))
    windows = curves.windows(rows, tables.blocks, WINDOWS)
    return {str(name): [_short(value) for value in windows[name]] for name in windows.columns}


def _short(value: float) -> float | None:
    """Five digits; JSON knows no NaN."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


# --- stages


def _stages(tables: Tables) -> list[dict[str, Any]]:
    """Of each group and stage: shares of each column of time at work and idle by cause, and single steps if few."""
    work = tables.repetitions[~tables.repetitions["lane"].isin(COPY_LANES)]
    if not len(work):
        return []
    idle = bubbles.idle_parts(tables.requests, tables.steps, tables.repetitions, tables.looks)
    edges = np.linspace(min(work["planned"].min(), idle["begin"].min()), work["finished"].max(), COLUMNS + 1)
    found = []
    for (group, stage), spans in _spans(work).items():
        kinds = {kind: spans[spans["kind"] == kind] for kind in BUSY}
        shares = {kind: _covered(part["begin"], part["end"], edges) for kind, part in kinds.items()}
        holes = idle[(idle["group"] == group) & (idle["stage"] == stage)]
        shares |= {str(cause): _covered(part["begin"], part["end"], edges) for cause, part in holes.groupby("cause")}
        single = spans if len(spans) <= MOST_SPANS else spans[:0]
        found.append(
            {
                "group": group,
                "stage": stage,
                "begin": float(edges[0]),
                "end": float(edges[-1]),
                "shares": {name: [_short(value) for value in values] for name, values in shares.items()},
                "spans": [
                    [
                        _micro(row.begin),
                        _micro(row.end),
                        BUSY.index(row.kind),
                        int(row.step),
                        int(row.prefill),
                        int(row.decode),
                    ]
                    for row in single.itertuples()
                ],
                "holes": [
                    [_micro(row.begin), _micro(row.end), str(row.cause)]
                    for row in (holes if len(single) else holes[:0]).itertuples()
                ],
            }
        )
    return found


def _micro(seconds: float) -> float:
    return round(float(seconds), 7)


def _spans(work: pd.DataFrame) -> dict[tuple[int, int], pd.DataFrame]:
    """Steps on each stage: begin, end, kind, step, prefill and decode tokens."""
    kind = np.where(work["prefill_tokens"] == 0, "decode", np.where(work["decode_tokens"] == 0, "prefill", "mixed"))
    rows = pd.DataFrame(
        {
            "kind": kind,
            "step": work["step"].to_numpy(),
            "prefill": work["prefill_tokens"].to_numpy(),
            "decode": work["decode_tokens"].to_numpy(),
        }
    )
    found = {}
    for stage, (begin, end) in enumerate(bubbles.spans(work)):
        for group in sorted(work["group"].unique()):
            mine = rows.assign(begin=begin, end=end)[(work["group"] == group).to_numpy()]
            found[int(group), stage] = mine.sort_values("begin", kind="stable")
    return found


def _covered(begin: pd.Series, end: pd.Series, edges: Array) -> Array:
    """The share of each column that stretches cover."""
    if not len(begin):
        return np.zeros(len(edges) - 1)
    stretches = bubbles.Intervals(np.sort(begin.to_numpy(float)), np.sort(end.to_numpy(float)))
    return np.clip(stretches.within(edges[:-1], edges[1:]) / np.diff(edges), 0.0, 1.0)


# --- sweeps


def labels(folders: Sequence[Path]) -> list[str]:
    """What tells a sweep's points apart: their options, as `sweep.json` has them; else the folders' names."""
    table = folders[0].parent / "sweep.json"
    if len(folders) < 2 or not table.is_file():
        return [folder.name for folder in folders]
    rows = {str(row.get("job")): row for row in json.loads(table.read_text(encoding="utf-8"))}
    numbers = set(SHOWN) | {"job", "error", "requests"}
    found = []
    for folder in folders:
        row = rows.get(folder.name, {})
        options = [f"{key}={value}" for key, value in row.items() if key not in numbers and _is_option(key, row)]
        found.append(" ".join(options) or folder.name)
    return found


def _is_option(key: str, row: dict[str, Any]) -> bool:
    """Options stand before the first figure of a row."""
    keys = list(row)
    figures = [place for place, name in enumerate(keys) if name in SHOWN or name in ("requests", "duration")]
    return keys.index(key) < min(figures, default=len(keys))
