"""What a report's page shows, as plain data: thinned so that a run of any length is a page of some hundred kilobytes.

Distributions are quantiles, time lines are windows with their least and most, stages are shares of columns of time;
nothing is a sample of single requests, so that what is rare is not lost by chance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import lint
from analysis.metrics import Tables, latencies, load, summarize
from analysis.report import stages
from analysis.report.timelines import LOSSES, Line, span, timelines
from analysis.report.twins import setting
from analysis.tokens import Array, gaps
from playground import trace

QUANTILES = np.unique(np.concatenate([np.linspace(0, 0.9, 181), 1 - np.geomspace(0.1, 1e-4, 120), [1.0]]))
"""Denser towards the tail."""
WINDOWS, WINDOWS_BESIDE = 2400, 600
"""Of a time line: of a run alone, so that it can be zoomed, and of one of several."""
MOST_BESIDE = 12
"""Runs whose time lines are drawn over each other; of more, none are."""
FIGURES = (
    "completed", "request_throughput", "output_throughput", "preemptions", "wasted_tokens", "prefix_hit_rate",
    "mean_kv_usage", "max_kv_usage", "bubble_ratio",
)  # fmt: skip
STATISTICS, METRICS = ("mean", "p50", "p90", "p99"), ("ttft", "tpot", "itl", "e2el")
SHOWN = (*FIGURES[:3], *(f"{one}_{name}_ms" for name in METRICS for one in STATISTICS), *FIGURES[3:])


@dataclass(frozen=True, slots=True)
class One:
    """A run: its name, what it was of, its figures and their intervals, and what its charts are drawn from.

    `setting`: what its twin on another backend shares with it. `lines`: `begin` and `end` in seconds, and windows by
    name and statistic.
    """

    name: str
    about: dict[str, Any]
    summary: dict[str, Any]
    intervals: dict[str, list[float | None]]
    cdfs: dict[str, list[list[float | None]]]
    lines: dict[str, Any]
    stages: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    setting: dict[str, Any]


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


def read(folder: Path, name: str, beside: int = 0) -> One:
    """`beside`: how many other runs share the page; stages are drawn of a run alone."""
    tables = load(folder)
    looked = lint.read(folder)
    finished = latencies(tables.requests[tables.requests["outcome"] == "finished"])
    summary = summarize(tables)
    described = _described(folder)
    return One(
        name,
        _about(folder, described),
        {key: summary.get(key) for key in SHOWN},
        _intervals(looked, ("mean",) if beside else STATISTICS),
        _cdfs(finished, tables),
        _lines(folder, tables, looked, WINDOWS_BESIDE if beside else WINDOWS) if beside < MOST_BESIDE else {},
        stages.stages(tables) if not beside else [],
        [asdict(finding) for finding in lint.lint(looked)],
        setting(looked.config, described) if looked.config else {},
    )


def _described(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _about(folder: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("backend", "device", "model", "seed", "started_at", "revision", "ended")
    policy = described.get("policy") or {}
    budget = policy.get("budget") if isinstance(policy.get("budget"), dict) else policy
    told = str((budget or {}).get("_target_", "")).rpartition(".")[2]
    return {name: described.get(name) for name in kept} | {"policy": told, "folder": str(folder)}


def _intervals(run: lint.Run, statistics: Sequence[str]) -> dict[str, list[float | None]]:
    """[low, high] in milliseconds by figure."""
    return {
        f"{row['statistic']}_{row['metric']}_ms": [_short(row["low"] * 1e3), _short(row["high"] * 1e3)]
        for row in lint.intervals(run, statistics)
    }


def _cdfs(finished: pd.DataFrame, tables: Tables) -> dict[str, list[list[float | None]]]:
    """[milliseconds, share] by metric."""
    tokens = tables.tokens
    samples = {name: finished[name].dropna().to_numpy() for name in ("ttft", "tpot", "e2el")}
    samples["itl"] = gaps(tokens[tokens["sequence"].isin(finished["id"])])
    return {name: _cdf(values) for name, values in samples.items() if len(values)}


def _cdf(values: Array) -> list[list[float | None]]:
    shares = QUANTILES if len(values) > len(QUANTILES) else (np.arange(len(values)) + 1) / len(values)
    return [[_short(at * 1e3), _short(share)] for at, share in zip(np.quantile(values, shares), shares, strict=True)]


def _lines(folder: Path, tables: Tables, run: lint.Run, windows: int) -> dict[str, Any]:
    queues = trace.read(folder, "steps", ["step", "lane", "waiting", "running"]).to_pandas()
    events = trace.read(folder, "events", ["now", "kind"]).to_pandas()
    losses = events["now"][events["kind"].isin(LOSSES)].to_numpy(float)
    left = run.arrivals["arrival"][~run.arrivals["id"].isin(tables.requests["id"])]
    edges = np.linspace(*span(tables), windows + 1)
    found = timelines(tables, queues, losses, edges, left.min() if len(left) else np.inf)
    shown = {name: _thin(line) for name, line in found.items()}
    return {"begin": float(edges[0]), "end": float(edges[-1])} | shown if shown else {}


def _thin(line: Line) -> dict[str, list[float | None]]:
    kept = {"mean": line.mean}
    if (line.least < line.most).any():
        kept |= {"least": line.least, "most": line.most}
    return {name: [_short(value) for value in values] for name, values in kept.items()}


def _short(value: float) -> float | None:
    """Five digits; JSON knows no NaN, and a whole number needs no point."""
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


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
