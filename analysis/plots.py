"""Pictures of one run, or of several side by side: written as PNG, never shown. Knows tables only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.metrics import Tables, latencies
from analysis.occupancy import kv_usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"ttft": "time to first token (s)", "tpot": "time per output token (s)"}


def save_all(runs: Mapping[str, Tables], folder: Path) -> list[Path]:
    """Latency distributions, tokens per step and KV use over time; `runs` by label."""
    figures = {"latency": latency_figure(runs), "tokens_per_step": tokens_figure(runs), "kv_usage": kv_figure(runs)}
    folder.mkdir(parents=True, exist_ok=True)
    return [_save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def latency_figure(runs: Mapping[str, Tables]) -> Figure:
    """Cumulative distributions of TTFT and TPOT, one line a run."""
    figure, axes = _panels(1, 2, width=10, height=4)
    for axis, (metric, label) in zip(axes, LABELS.items(), strict=True):
        for name, tables in runs.items():
            _ecdf(axis, latencies(_finished(tables))[metric].dropna().to_numpy(), name)
        axis.set(xlabel=label, ylabel="share of requests", ylim=(0, 1))
        _log_if_wide(axis)
    _legend(figure, axes[0])
    return figure


def tokens_figure(runs: Mapping[str, Tables]) -> Figure:
    """Prefill and decode tokens of every step over time, one panel a run."""
    figure, axes = _panels(len(runs), 1, width=10, height=2.2 * len(runs) + 0.6)
    for axis, (name, tables) in zip(axes, runs.items(), strict=True):
        steps = tables.steps
        for kind in ("prefill", "decode"):
            some = steps[steps[f"{kind}_tokens"] > 0]
            axis.plot(some["started"], some[f"{kind}_tokens"], ".", markersize=2, label=kind)
        axis.set(title=name, ylabel="tokens a step", yscale="log")
    _legend(figure, axes[0], markerscale=4)
    axes[-1].set_xlabel("time (s)")
    return figure


def kv_figure(runs: Mapping[str, Tables]) -> Figure:
    """Share of the KV pool in use over time, one line a run (mean of the groups where there are several)."""
    figure, (axis,) = _panels(1, 1, width=10, height=3.5)
    for name, tables in runs.items():
        usage = kv_usage(tables.repetitions, tables.blocks).sort_values("time")
        axis.step(usage["time"], usage["used"], where="post", linewidth=0.8, label=name)
    axis.set(xlabel="time (s)", ylabel="share of KV blocks in use", ylim=(0, 1.02))
    _legend(figure, axis)
    return figure


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    # Imported here: a simulation without plots must not pay for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=columns == 1, sharey=columns == 1)
    return figure, list(axes.flat)


def _legend(figure: Figure, axis: Axes, **options: float) -> None:
    """Above the panels, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, **options)


def _ecdf(axis: Axes, values: np.ndarray, name: str) -> None:
    if len(values):
        axis.ecdf(values, label=f"{name} (n={len(values):,})")


def _log_if_wide(axis: Axes) -> None:
    """A queue's tail would otherwise squeeze everything else against the axis."""
    lines = [np.asarray(line.get_xdata(), dtype=float) for line in axis.lines]
    positive = [line[np.isfinite(line) & (line > 0)] for line in lines]
    # One line beside slow ones must not be squeezed either.
    medians = [float(np.median(line)) for line in positive if len(line)]
    if medians and max(line.max() for line in positive if len(line)) > 30 * min(medians):
        axis.set_xscale("log")


def _finished(tables: Tables) -> pd.DataFrame:
    return tables.requests[tables.requests["outcome"] == "finished"]


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path
