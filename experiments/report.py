"""Numbers as tables for people. Knows keys of a summary, not how they came about."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]

LABELS = {
    "completed": "completed",
    "rejected": "rejected",
    "request_throughput": "req/s",
    "output_throughput": "output tok/s",
    "request_goodput": "goodput req/s",
    "slo_attainment": "SLO met",
    "mean_ttft_ms": "TTFT mean (ms)",
    "p99_ttft_ms": "TTFT p99",
    "mean_tpot_ms": "TPOT mean (ms)",
    "p99_tpot_ms": "TPOT p99",
    "p99_itl_ms": "ITL p99 (ms)",
    "mean_e2el_ms": "E2E mean (ms)",
    "preemptions": "preemptions",
    "wasted_tokens": "wasted tok",
    "prefix_hit_rate": "prefix hits",
    "bubble_ratio": "bubbles",
    "bubble_unready": "· nothing ready",
    "bubble_host": "· host",
    "bubble_upstream": "· stage before",
    "bubble_fill": "· fill",
    "bubble_drain": "· drain",
    "cv_tokens_per_step": "CV tok/step",
    "mean_kv_usage": "KV used",
}
DETAILS = {key for key in LABELS if key.startswith("bubble_")} - {"bubble_ratio"}
SHARES = {"slo_attainment", "prefix_hit_rate", "bubble_ratio", "mean_kv_usage"} | DETAILS
ALWAYS = ("completed", "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
          "p99_tpot_ms", "p99_itl_ms", "bubble_ratio", "cv_tokens_per_step", "mean_kv_usage")  # fmt: skip


SIDE_BY_SIDE = 5
"""Up to so many runs stand in columns, which reads better; more become lines."""


def comparison(rows: Sequence[tuple[Row, Row]]) -> Table:
    """What distinguishes each run, then its summary. Metrics that say nothing are left out."""
    keys = [key for key in LABELS if key in ALWAYS or any(summary.get(key) for _, summary in rows)]
    names = list(dict.fromkeys(name for labels, _ in rows for name in labels))
    if len(rows) <= SIDE_BY_SIDE:
        return _columns(rows, keys, names)
    return _lines(rows, [key for key in keys if key not in DETAILS], names)


def _lines(rows: Sequence[tuple[Row, Row]], keys: Sequence[str], names: Sequence[str]) -> Table:
    table = _table()
    for name in names:
        table.add_column(name, style="cyan", no_wrap=True)
    for key in keys:
        table.add_column(LABELS[key], justify="right")
    for labels, summary in rows:
        cells = [str(labels.get(name, "")) for name in names]
        table.add_row(*cells, *(number(key, summary.get(key)) for key in keys))
    return table


def _columns(rows: Sequence[tuple[Row, Row]], keys: Sequence[str], names: Sequence[str]) -> Table:
    table = _table()
    table.add_column("\n".join(names), style="cyan", no_wrap=True)
    for labels, _ in rows:
        table.add_column("\n".join(str(labels.get(name, "")) for name in names), justify="right")
    for key in keys:
        table.add_row(LABELS[key], *(number(key, summary.get(key)) for _, summary in rows))
    return table


def _table() -> Table:
    return Table(box=SIMPLE_HEAD)


def one_run(summary: Row, name: str) -> Table:
    return comparison([({"": name}, summary)])


def number(key: str, value: float | None) -> str:
    """Three digits that matter; shares as per cent; a dash where there is nothing."""
    if value is None:
        return "–"
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def console() -> Console:
    """Standard output; wide where no terminal sets a width, so that a table in a file keeps its lines."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 200)


def for_programs(result: Mapping[str, Any]) -> None:
    """The last line of standard output, as JSON; people at a terminal are spared it."""
    if not sys.stdout.isatty():
        print(json.dumps(result), flush=True)
