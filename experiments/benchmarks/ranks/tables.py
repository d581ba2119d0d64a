"""The tables of docs/parallel.md, each from the record of `python -m experiments.benchmarks.ranks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.benchmarks.gpu.engine.report import reached
from experiments.benchmarks.gpu.tables import found
from experiments.benchmarks.layout import table
from experiments.benchmarks.ranks.twin import TWIN

Record = Mapping[str, Any]
Row = Mapping[str, Any]


def measured(record: Record) -> str:
    """All but the pipeline's bubbles, and what failed."""
    lines = [
        [
            row["work"],
            _value(row["limit"], row["unit"]) if row["limit"] else "",
            _value(row["target"], row["unit"]) if row["target"] else "",
            _value(row["measured"], row["unit"]),
            ("yes" if reached(dict(row)) else "**no**") if row["target"] else "",
        ]
        for row in record["rows"]
        if row["part"] != "bubbles"
    ]
    failed = [f"- {failure['name']}: {failure['error']}" for failure in record["failures"]]
    wrong = [f"- {check['name']}: not as one GPU" for check in record["checks"] if not check["good"]]
    told = table(["work", "limit", "to reach", "measured", "reached"], lines)
    return "\n\n".join([found(record), told, *(["\n".join(failed + wrong)] if failed + wrong else [])])


def bubbles(record: Record) -> str:
    """What stages waited for, beside the simulated twin."""
    rows = [row for row in record["rows"] if row["part"] == "bubbles"]
    if not rows:
        return "Not part of the recorded run."
    rows.sort(key=lambda row: row["work"].removesuffix(TWIN))
    causes = list(rows[0]["causes"])
    lines = [
        [
            row["work"].removeprefix("bubbles, PP2, "),
            f"{row['measured']:.1%}",
            *(f"{row['causes'][cause]:.1%}" for cause in causes),
            f"{row['ttft_ms'] / 1e3:.2f} s",
            f"{row['tpot_ms']:.1f} ms",
        ]
        for row in rows
    ]
    return table(["", "bubble ratio", *causes, "TTFT, mean", "TPOT, mean"], lines)


def _value(value: float, unit: str) -> str:
    if unit == "times":
        return f"{value:.2f}×"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


RANKS: Mapping[str, Callable[[Record], str]] = {"ranks": measured, "ranks_bubbles": bubbles}
