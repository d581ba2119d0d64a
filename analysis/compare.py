"""Two runs of one workload, request by request: paired differences with confidence intervals."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import lint
from analysis.files import write_json
from analysis.intervals import Statistic, interval
from analysis.lint import LATENCIES, NEEDED, Run
from analysis.tokens import Array

SAME = ("arrival", "prompt_length", "max_tokens")
"""Of a request, what two runs of one workload have in common."""
LATE = 1e-6
"""Seconds by which arrivals of the same request may differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one figure, in seconds (rates: 1/s): in A, in B, B - A and its 95 % interval."""

    metric: str
    statistic: str
    a: float
    b: float
    low: float
    high: float

    @property
    def change(self) -> float:
        return self.b - self.a

    @property
    def verdict(self) -> str:
        if np.isnan(self.low):
            return "-"
        return "no difference" if self.low <= 0 <= self.high else "lower" if self.change < 0 else "higher"


def pairs(a: Run, b: Run) -> pd.DataFrame:
    """Requests that finished in both, by arrival; columns `METRIC_a`, `METRIC_b`.

    `ValueError`, in a line, if the runs served other workloads.
    """
    columns = ["id", *SAME]
    both = a.arrivals[columns].merge(b.arrivals[columns], on="id", suffixes=("_a", "_b"))
    if len(both) < max(len(a.arrivals), len(b.arrivals)):
        raise ValueError(
            f"{a.folder} and {b.folder}: other workloads: {len(a.arrivals):,} and {len(b.arrivals):,} requests, of "
            f"which {len(both):,} have an id in common; compare runs of one workload and seed"
        )
    for name in SAME:
        if name == "arrival" and (lint.closed(a) or lint.closed(b)):
            continue  # they answer to completions
        differ = (both[f"{name}_a"] - both[f"{name}_b"]).abs() > LATE
        if differ.any():
            row = both[differ].iloc[0]
            raise ValueError(
                f"{a.folder} and {b.folder}: other workloads: request {int(row['id'])} has {name} "
                f"{row[f'{name}_a']:g} and {row[f'{name}_b']:g}; compare runs of one workload and seed"
            )
    kept = ["id", "arrival", *LATENCIES]
    found = a.served[kept].merge(b.served[["id", *LATENCIES]], on="id", suffixes=("_a", "_b"))
    return found.sort_values(["arrival", "id"], ignore_index=True)


def differences(paired: pd.DataFrame) -> list[Difference]:
    """Of mean and percentiles of each latency; percentiles of enough requests only."""
    found = []
    for metric in LATENCIES:
        values = paired[[f"{metric}_a", f"{metric}_b"]].dropna().to_numpy()
        if len(values) < 2:
            continue
        statistics: dict[str, Statistic] = {"mean": _mean_change}
        statistics |= {f"p{q}": _quantile_change(q) for q, needed in NEEDED.items() if len(values) >= needed}
        for name, of in statistics.items():
            a, b = (float(_figure(name, values[:, side])) for side in (0, 1))
            found.append(Difference(metric, name, a, b, *interval(values, of)))
    return found


def _figure(name: str, values: Array) -> float:
    return float(values.mean() if name == "mean" else np.percentile(values, float(name[1:])))


def _mean_change(samples: Array) -> Array:
    found: Array = (samples[..., 1] - samples[..., 0]).mean(axis=1)
    return found


def _quantile_change(q: float) -> Statistic:
    """Drawn in pairs: what both runs share cancels."""

    def change(samples: Array) -> Array:
        low, high = np.percentile(samples, q, axis=1).T
        found: Array = high - low
        return found

    return change


HELP = """\
Two runs of one workload, request by request: what B changes of A, with 95 % intervals of the difference. Both are drawn
together in blocks of neighbouring requests, so that what the requests have in common cancels. Runs of other workloads
are refused; what `lint` finds in either is told.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="two runs of one workload, request by request",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the same as JSON")
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    a, b = lint.read(given.a), lint.read(given.b)
    paired = pairs(a, b)
    found = differences(paired)
    findings = {"a": lint.lint(a), "b": lint.lint(b)}
    print(told(a, b, paired, found, findings))
    if given.out:
        write_json(given.out, _data(a, b, paired, found, findings))
    return 0


Findings = Mapping[str, Sequence[lint.Finding]]
"""By side."""


def told(a: Run, b: Run, paired: pd.DataFrame, found: Sequence[Difference], findings: Findings) -> str:
    """For a terminal."""
    lines = [f"A = {a.folder}", f"B = {b.folder}", f"{len(paired):,} requests finished in both", ""]
    lines.append(f"{'':11} {'A (ms)':>12} {'B (ms)':>12} {'B - A (ms)':>12}  {'95 % interval':25} change")
    for one in found:
        bounds = f"[{one.low * 1e3:+,.2f}, {one.high * 1e3:+,.2f}]"
        share = f"{one.change / one.a:+.1%}" if one.a else "-"
        lines.append(
            f"{one.metric.upper():5} {one.statistic:5} {one.a * 1e3:12,.2f} {one.b * 1e3:12,.2f} "
            f"{one.change * 1e3:+12,.2f}  {bounds:25} {share:>7}  {one.verdict}"
        )
    for name, value in rates(a, b).items():
        lines.append(f"{name:11} {value[0]:12,.4g} {value[1]:12,.4g} {value[1] - value[0]:+12,.4g}")
    for side, some in findings.items():
        lines += [f"{side.upper()}: {finding}" for finding in some if not finding.note]
    return "\n".join(lines)


def rates(a: Run, b: Run) -> dict[str, tuple[float, float]]:
    """Of whole runs: they have no pairs, and so no interval."""

    def both(of: Any) -> tuple[float, float]:
        return float(of(a)), float(of(b))

    return {
        "requests/s": both(lambda run: len(run.served) / run.duration if run.duration else 0.0),
        "preemptions": both(lambda run: run.ended["preemptions"].sum()),
    }


def _data(a: Run, b: Run, paired: pd.DataFrame, found: Sequence[Difference], findings: Findings) -> dict[str, Any]:
    return {
        "a": str(a.folder),
        "b": str(b.folder),
        "requests": len(paired),
        "differences": [asdict(one) | {"change": one.change, "verdict": one.verdict} for one in found],
        "rates": rates(a, b),
        "findings": {side: [asdict(one) for one in some] for side, some in findings.items()},
    }
