"""The page itself: the data of a report in a document that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from analysis.report.data import SHOWN, One

NAMES = {
    "completed": "completed", "request_throughput": "requests/s", "output_throughput": "output tokens/s",
    "preemptions": "preemptions", "wasted_tokens": "tokens again", "prefix_hit_rate": "prefix hits",
    "mean_kv_usage": "KV, mean", "max_kv_usage": "KV, most", "bubble_ratio": "bubbles",
}  # fmt: skip
WIDE = 20.0
"""Ratio beyond which an axis is logarithmic."""


def page(title: str, runs: Sequence[One], revision: str = "") -> str:
    """A whole document. Of several runs only distributions, figures and their Pareto front are shown."""
    data = {
        "title": title,
        "about": _about(runs),
        "runs": [asdict(run) for run in runs],
        "columns": SHOWN,
        "names": {key: NAMES.get(key) or _named(key) for key in SHOWN},
        "pareto": _pareto(runs),
        "mixed": len({run.about.get("backend") == "SimBackend" for run in runs}) > 1,
        "span": _span(runs[0]),
        "groups": len({stage["group"] for stage in runs[0].stages}),
        "made": f"python -m analysis report {revision}".strip(),
    }
    template = files("analysis.report").joinpath("page.html").read_text(encoding="utf-8")
    # Whatever a name holds, it ends no script.
    return template.replace("__DATA__", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def _named(key: str) -> str:
    """`p99_ttft_ms` as P99 TTFT (ms)."""
    statistic, _, rest = key.partition("_")
    return f"{statistic.upper() if statistic[0] == 'p' else statistic} {rest.removesuffix('_ms').upper()} (ms)"


def _about(runs: Sequence[One]) -> str:
    told = []
    for name in ("model", "device", "backend"):
        values = list(dict.fromkeys(str(run.about[name]) for run in runs if run.about.get(name)))
        told += [", ".join(values)] if values else []
    if len(runs) > 1:
        return f"{len(runs)} runs; {'; '.join(told)}"
    return "; ".join(filter(None, [runs[0].about.get("policy"), *told, runs[0].about.get("started_at")]))


def _span(run: One) -> list[float]:
    """Seconds from the first to the last thing that charts over time show."""
    times = [time for time in run.lines.get("time", []) if time is not None]
    ends = [end for stage in run.stages for end in (stage["begin"], stage["end"])]
    return [min([0.0, *ends]), max([*times, *ends], default=1.0)]


def _pareto(runs: Sequence[One]) -> dict[str, Any] | None:
    """Mean TTFT and TPOT of each run, and which of them no other beats in both; None of fewer than two."""
    points = [
        {"name": run.name, "ttft": run.summary["mean_ttft_ms"], "tpot": run.summary["mean_tpot_ms"]}
        for run in runs
        if run.summary["mean_ttft_ms"] is not None and run.summary["mean_tpot_ms"] is not None
    ]
    if len(points) < 2:
        return None
    for one in points:
        one["front"] = not any(_beats(other, one) for other in points)
    ttfts = [one["ttft"] for one in points]
    log = max(ttfts) > WIDE * min(ttfts) > 0
    room = (max(ttfts) - min(ttfts)) * 0.05 or max(ttfts) * 0.1
    ends = [min(ttfts) * 0.8, max(ttfts) * 1.25] if log else [max(min(ttfts) - room, 0.0), max(ttfts) + room]
    return {"points": points, "log": log, "range": ends}


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    no_worse = one["ttft"] <= other["ttft"] and one["tpot"] <= other["tpot"]
    return bool(no_worse and (one["ttft"] < other["ttft"] or one["tpot"] < other["tpot"]))
