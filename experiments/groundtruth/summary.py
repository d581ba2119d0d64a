"""Errors put together: by source, engine, model, hardware and load; and against the targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.groundtruth.replay import Row

TARGETS = {"tpot": 0.10, "ttft": 0.15}
"""Median absolute error on test cases below saturation."""
METRICS = ("tpot", "ttft", "e2el", "throughput", "step")


@dataclass(frozen=True, slots=True)
class Spread:
    """Errors of one metric: how many, their median size, their median, the share of predictions too high."""

    count: int
    size: float
    sign: float
    above: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Spread | None:
        if not errors:
            return None
        above = sum(error > 0 for error in errors) / len(errors)
        return cls(len(errors), median(map(abs, errors)), median(errors), above)


Group = tuple[str, str, str, str, str, str, bool]
"""Source, engine, model, device, load, cost model, fitted."""


def groups(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    found: dict[Group, list[Row]] = {}
    for row in rows:
        group = (row.source, row.engine, row.model, row.device, row.load, row.cost, row.fitted)
        found.setdefault(group, []).append(row)
    return dict(sorted(found.items()))


def spread(rows: Iterable[Row], metric: str) -> Spread | None:
    """Of the possible measurements."""
    return Spread.of([row.errors[metric] for row in rows if metric in row.errors and metric not in row.impossible])


def best(rows: Iterable[Row]) -> list[Row]:
    """Of each case the prediction that would be used: by profiles where there are any, with what was fitted."""
    chosen: dict[tuple[str, ...], Row] = {}
    for row in rows:
        case = (row.source, row.name, row.engine, row.model, row.device, str(row.tp), row.split)
        if case not in chosen or _rank(row) > _rank(chosen[case]):
            chosen[case] = row
    return list(chosen.values())


def worst(rows: Iterable[Row], metric: str, count: int) -> list[Row]:
    told = [row for row in rows if metric in row.errors and metric not in row.impossible]
    return sorted(told, key=lambda row: -abs(row.errors[metric]))[:count]


def _rank(row: Row) -> tuple[bool, bool]:
    return row.cost != "roofline", row.fitted
