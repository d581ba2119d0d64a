"""The page itself: the data of a report in a document that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from analysis.report import twins
from analysis.report.data import SHOWN, One

NAMES = {
    "completed": "completed", "request_throughput": "requests/s", "output_throughput": "output tokens/s",
    "preemptions": "preemptions", "wasted_tokens": "tokens again", "prefix_hit_rate": "prefix hits",
    "mean_kv_usage": "KV, mean", "max_kv_usage": "KV, most", "bubble_ratio": "bubbles",
}  # fmt: skip
SCRIPTS = ("chart.js", "page.js")
WIDE = 20.0
"""Ratio beyond which an axis is logarithmic."""


def page(title: str, runs: Sequence[One]) -> str:
    """A whole document. Stages are those of a run alone; of several, time lines lie over each other."""
    pairs = _pairs(runs)
    shown = [asdict(run) for run in runs]
    for run in shown:
        del run["setting"]
    data = {
        "title": title,
        "about": _about(runs),
        "runs": shown,
        "columns": SHOWN,
        "names": {key: NAMES.get(key) or _named(key) for key in SHOWN},
        "twins": [
            {
                "hardware": one,
                "simulated": other,
                "errors": twins.errors(runs[one].summary, runs[other].summary),
            }
            for one, other in pairs
        ],
        "colours": _colours(len(runs), pairs),
        "dashed": _dashed(runs),
        "pareto": _pareto(runs),
        "span": _span(runs),
        "groups": len({stage["group"] for stage in runs[0].stages}),
        "made": "python -m analysis report",
    }
    folder = files("analysis.report")
    template, *scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", *SCRIPTS)]
    before, _, rest = template.partition("__DATA__")
    middle, _, after = rest.partition("__SCRIPTS__")
    # Whatever a name holds, it ends no script.
    return before + json.dumps(data, allow_nan=False).replace("<", "\\u003c") + middle + "\n".join(scripts) + after


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


def _pairs(runs: Sequence[One]) -> list[tuple[int, int]]:
    return twins.twins([run.setting for run in runs], [run.about.get("backend") for run in runs])


def _colours(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """A number for each run; a simulated run has its hardware run's."""
    like = {simulated: hardware for hardware, simulated in pairs}
    own = [place for place in range(count) if place not in like]
    return [own.index(like.get(place, place)) for place in range(count)]


def _dashed(runs: Sequence[One]) -> list[bool]:
    """Simulated ones, if others are beside them."""
    simulated = [run.about.get("backend") == twins.SIMULATED for run in runs]
    return [one and not all(simulated) for one in simulated]


def _span(runs: Sequence[One]) -> list[float]:
    """Seconds from the first to the last thing that charts over time show."""
    parts = [part for run in runs for part in (run.lines, *run.stages) if part]
    return [min([part["begin"] for part in parts], default=0.0), max([part["end"] for part in parts], default=1.0)]


def _pareto(runs: Sequence[One]) -> dict[str, Any] | None:
    """Mean TTFT and TPOT of each run, and which of them no other beats in both; None of fewer than two."""
    points = [
        {"run": number, "ttft": run.summary["mean_ttft_ms"], "tpot": run.summary["mean_tpot_ms"]}
        for number, run in enumerate(runs)
        if run.summary["mean_ttft_ms"] is not None and run.summary["mean_tpot_ms"] is not None
    ]
    if len(points) < 2:
        return None
    for one in points:
        one["front"] = not any(_beats(other, one) for other in points)
    ends = [end for one in points for end in (one["ttft"], *runs[one["run"]].intervals.get("mean_ttft_ms", []))]
    least, most = min(ends), max(ends)
    log = most > WIDE * least > 0
    room = (most - least) * 0.05 or most * 0.1
    return {
        "points": points,
        "log": log,
        "range": [least * 0.8, most * 1.25] if log else [max(least - room, 0.0), most + room],
    }


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    no_worse = one["ttft"] <= other["ttft"] and one["tpot"] <= other["tpot"]
    return bool(no_worse and (one["ttft"] < other["ttft"] or one["tpot"] < other["tpot"]))
