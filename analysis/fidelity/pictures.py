"""The report's pictures, as PNG inside of HTML."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.fidelity.layers import LATENCIES, figures
from analysis.fidelity.study import Pair, settings
from analysis.metrics import Tables
from analysis.occupancy import kv_usage
from analysis.tokens import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = {"decode": "#2f6fb3", "mixed": "#c8632b", "prefill": "#4c9a57"}
HARDWARE: dict[str, Any] = {"color": "#1c2330", "linewidth": 1.1}
SIMULATED: dict[str, Any] = {"color": "#d1492f", "linewidth": 1.0, "alpha": 0.85}
MOST_POINTS = 6000
BINS = 160


def _figure(
    rows: int, columns: int, width: float, height: float, heights: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    # Imported here: a report without a page must not pay for matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat)


def _image(figure: Figure, about: str) -> str:
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return f"<img alt='{about}' src='data:image/png;base64,{b64encode(stream.getvalue()).decode()}'>"


def steps(pairs: Sequence[Pair]) -> str:
    """Predicted over measured, and the error over the measured time."""
    every = pd.concat([pair.predicted for pair in pairs])
    shown = every.sample(min(len(every), MOST_POINTS), random_state=0)
    figure, (left, right) = _figure(1, 2, 12, 4.4)
    for kind, part in shown.groupby("kind"):
        colour, name = COLOURS.get(str(kind), "grey"), f"{kind} ({(every['kind'] == kind).sum():,})"
        left.plot(part["measured"] * 1e3, part["predicted"] * 1e3, ".", color=colour, markersize=2.5, label=name)
        off = (part["predicted"] / part["measured"] - 1) * 100
        right.plot(part["measured"] * 1e3, off, ".", color=colour, markersize=2.5)
    ends = [shown[["measured", "predicted"]].min().min() * 1e3, shown[["measured", "predicted"]].max().max() * 1e3]
    left.plot(ends, ends, color="#999", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)", title="single steps")
    left.legend(markerscale=4, frameon=False)
    right.axhspan(-4, 4, color="#e3f4e6")
    right.set(xscale="log", xlabel="measured (ms)", ylabel="error (%)", ylim=(-40, 40), title="error (green: 4 %)")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        _plain(axis)
    return _image(figure, "predicted against measured step times")


def _plain(axis: Axis) -> None:
    """Numbers on a logarithmic axis as one says them: 1, 2, 5, 10, not powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


RANKED = (
    ("throughput", "req/s"),
    ("ttft_p90", "TTFT P90 (s)"),
    ("tpot_p90", "TPOT P90 (s)"),
    ("e2el_p50", "E2EL P50 (s)"),
)


def rankings(pairs: Sequence[Pair]) -> str:
    """For every setting with several policies, a line a policy: where hardware has it, and where the simulation."""
    several = {setting: members for setting, members in settings(pairs).items() if len({m.policy for m in members}) > 1}
    policies = [list(dict.fromkeys(pair.policy for pair in members)) for members in several.values()]
    heights = [len(names) + 1.6 for names in policies]
    figure, axes = _figure(len(several), len(RANKED), 15, 0.36 * sum(heights) + 0.4, heights)
    for row, (setting, members) in enumerate(several.items()):
        values = [figures(pair) for pair in members]
        for column, (metric, title) in enumerate(RANKED):
            axis = axes[row * len(RANKED) + column]
            for pair, value in zip(members, values, strict=True):
                place = policies[row].index(pair.policy)
                axis.plot(value[metric], [place] * 2, color="#c9d0dc", linewidth=3, zorder=1)
                axis.plot(value[metric][0], place, "o", color=HARDWARE["color"], markersize=6, label="hardware")
                axis.plot(value[metric][1], place, "D", color=SIMULATED["color"], markersize=4, label="simulated")
            axis.set(yticks=range(len(policies[row])), ylim=(len(policies[row]) - 0.5, -0.5))
            axis.set_yticklabels(policies[row] if column == 0 else [])
            axis.set_title(f"{' / '.join(setting)}: {title}" if column == 0 else title, fontsize=10)
            axis.grid(axis="x", color="#e3e7ee")
            axis.locator_params(axis="x", nbins=4)
    axes[0].legend(*_once(axes[0]), frameon=False, fontsize=8)
    return _image(figure, "policies on hardware and simulated")


def _once(axis: Axes) -> tuple[list[Any], list[str]]:
    """Handles and labels of a legend, each label once."""
    named = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    return list(named.values()), list(named)


def errors(found: Mapping[str, Any]) -> str:
    """Errors of all runs by metric."""
    rows = pd.DataFrame(found["trajectory"])
    metrics = list(dict.fromkeys(rows["metric"]))
    figure, (axis,) = _figure(1, 1, 12, 3.4)
    for place, metric in enumerate(metrics):
        values = rows.loc[rows["metric"] == metric, "error"].to_numpy() * 100
        spots = place + np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else [place]
        axis.plot(spots, values, "o", color="#2f6fb3", markersize=4, alpha=0.8)
        axis.plot([place - 0.3, place + 0.3], [np.median(values)] * 2, color="#d1492f", linewidth=2)
    axis.axhspan(-5, 5, color="#e3f4e6", zorder=0)
    axis.axhline(0, color="#999", linewidth=0.8)
    axis.set(ylabel="error (%)", xticks=range(len(metrics)), title="every run; red: median; green: 5 %")
    axis.set_xticklabels([metric.replace("_", " ").upper() if "_" in metric else "req/s" for metric in metrics])
    return _image(figure, "errors of runs by metric")


def courses(pair: Pair) -> str:
    """Of one run: running, waiting, KV use and tokens a step over time, and the distributions, laid over each other."""
    figure, axes = _figure(2, 4, 15, 5.6)
    sides = ((pair.hardware, HARDWARE, "hardware"), (pair.simulated, SIMULATED, "simulated"))
    for tables, style, name in sides:
        running, waiting = (_populations(tables, kind) for kind in ("running", "waiting"))
        axes[0].step(*running, where="post", label=name, **style)
        axes[1].step(*waiting, where="post", **style)
        usage = kv_usage(tables.repetitions, tables.blocks).sort_values("time")
        axes[2].step(usage["time"], usage["used"] * 100, where="post", **style)
        axes[3].plot(*_rate(tables), **style)
    for axis, title in zip(axes, ("running", "waiting", "KV in use (%)", "tokens/s"), strict=False):
        axis.set(title=title, xlabel="time (s)")
    for axis, name in zip(axes[4:], LATENCIES, strict=False):
        for side, style in zip(pair.latencies, (HARDWARE, SIMULATED), strict=True):
            values = np.sort(side[name].dropna().to_numpy())
            axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", **style)
        axis.set(title=f"{name.upper()} (s), share of requests", xscale="log")
    real, made = (side.set_index("id")["e2el"] for side in pair.latencies)
    both = pd.concat([real, made], axis=1, keys=["real", "made"]).dropna()
    axes[7].plot(both["real"], both["made"], ".", color="#2f6fb3", markersize=3)
    axes[7].axline((0, 0), slope=1, color="#999", linewidth=0.8)
    axes[7].set(title="E2EL request by request (s)", xlabel="hardware", ylabel="simulated")
    axes[0].legend(frameon=False)
    return _image(figure, f"courses of {pair.name}")


def _populations(tables: Tables, kind: str) -> tuple[Array, Array]:
    """(times, requests that run or wait from then on)"""
    requests = tables.requests
    begins, ends = ("admitted", "finished") if kind == "running" else ("arrival", "admitted")
    known = requests.dropna(subset=[begins, ends])
    times = np.concatenate([known[begins], known[ends]])
    change = np.concatenate([np.ones(len(known)), -np.ones(len(known))])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(change[order])


def _rate(tables: Tables) -> tuple[Array, Array]:
    """Tokens computed in each of `BINS` spans, a second."""
    found = tables.repetitions
    edges = np.linspace(0, float(found["finished"].max()), BINS + 1)
    tokens = found["prefill_tokens"] + found["decode_tokens"]
    sums, _ = np.histogram(found["finished"], edges, weights=tokens)
    return (edges[1:] + edges[:-1]) / 2, sums / np.diff(edges)
