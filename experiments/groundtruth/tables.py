"""The tables of docs/groundtruth.md, between `<!-- table:NAME -->` and `<!-- end -->`, from recorded results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.benchmarks.layout import table
from experiments.groundtruth import results
from experiments.groundtruth.replay import Row
from experiments.groundtruth.summary import METRICS, TARGETS, Spread, best, groups, spread, worst

PAGE = Path(__file__).parents[2] / "docs" / "groundtruth.md"
NONE = "–"
WORST = 10


def write() -> None:
    """Make every table of the page anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    return re.sub(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", _fill, page, flags=re.DOTALL)


def _fill(found: re.Match[str]) -> str:
    return f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}"


def overview(rows: Sequence[Row]) -> str:
    """Median absolute error and, in brackets, median error, by group."""
    head = ["source", "engine", "model", "device", "load", "cost model", "cases", *(name.upper() for name in METRICS)]
    body = [
        [*group[:5], _cost(group[5], group[6]), str(len(members)), *(_both(spread(members, m)) for m in METRICS)]
        for group, members in groups(rows).items()
    ]
    return table(head, body)


def targets(rows: Sequence[Row]) -> str:
    """Test cases below saturation against the targets: of all rows, and of each source."""
    chosen = [row for row in best(rows) if row.load == "below saturation"]
    sources = sorted({row.source for row in chosen})
    engines = sorted({row.engine for row in chosen})
    parts = [("all", chosen)]
    parts += [(name, [row for row in chosen if row.source == name]) for name in sources]
    parts += [(name, [row for row in chosen if row.engine == name]) for name in engines]
    head = ["", *(f"{m.upper()}, target {limit:.0%}" for m, limit in TARGETS.items()), "TPOT too high", "TTFT too high"]
    return table(head, [[name, *_against(members)] for name, members in parts])


def _against(members: Sequence[Row]) -> list[str]:
    spreads = [spread(members, metric) for metric in TARGETS]
    sizes = [
        f"{found.size:.1%} ({found.sign:+.1%}), {'met' if found.size <= limit else 'missed'}" if found else NONE
        for found, limit in zip(spreads, TARGETS.values(), strict=True)
    ]
    return sizes + [f"{found.above:.0%} of {found.count}" if found else NONE for found in spreads]


def each(rows: Sequence[Row]) -> str:
    """Predicted and measured, case by case."""
    body = []
    for row in rows:
        for metric, measured in row.measured.items():
            if metric in row.errors:
                error = "impossible" if metric in row.impossible else f"{row.errors[metric]:+.1%}"
                values = _value(metric, row.predicted[metric]), _value(metric, measured)
                body.append([row.name, _where(row), _cost(row.cost, row.fitted), metric, *values, error])
    return table(["case", "model, device", "cost model", "", "predicted", "measured", "error"], body)


def curves(rows: Sequence[Row]) -> str:
    """How far apart the curves lie."""
    names = ("running_distance", "waiting_distance", "throughput_distance", "preemptions")
    told = [row for row in rows if any(name in row.predicted for name in names)]
    body = [
        [row.name, _where(row), _cost(row.cost, row.fitted), *(_distance(row, name) for name in names)] for row in told
    ]
    return table(["case", "model, device", "cost model", "running", "waiting", "tokens a second", "preemptions"], body)


def _distance(row: Row, name: str) -> str:
    if (value := row.predicted.get(name)) is None:
        return NONE
    return f"{value:.0f}" if name == "preemptions" else f"{value:.0%}"


def worst_cases(rows: Sequence[Row]) -> str:
    chosen = [row for row in best(rows) if row.load == "below saturation"]
    body = [
        [metric.upper(), row.name, row.engine, _where(row), _value(metric, row.predicted[metric]),
         _value(metric, row.measured[metric]), f"{row.errors[metric]:+.0%}"]
        for metric in TARGETS
        for row in worst(chosen, metric, WORST)
    ]  # fmt: skip
    return table(["", "case", "engine", "model, device", "predicted", "measured", "error"], body)


def unknowns() -> str:
    body = [
        [engine, cost, f"{one.base * 1e3:.2f}", f"{one.per_sequence * 1e6:.0f}", f"{one.eager * 1e3:.2g}",
         f"{one.latency * 1e3:.0f}"]
        for cost, fit in results.read_unknowns().items()
        for engine, one in fit.items()
    ]  # fmt: skip
    head = ["engine, model", "cost model", "ms a step", "µs a sequence", "ms to launch a layer", "front end, ms"]
    return table(head, body)


def skipped() -> str:
    body = [[one.source, one.what, str(one.cases), one.why] for one in results.skipped()]
    return table(["source", "what", "rows", "why not"], body)


def impossible(rows: Sequence[Row]) -> str:
    told = [row for row in best(rows) if row.impossible]
    body = [
        [row.source, row.name, _where(row), metric, _value(metric, row.measured[metric])]
        for row in told
        for metric in row.impossible
    ]
    return table(["source", "case", "model, device", "", "measured"], body)


def _test() -> list[Row]:
    return [row for row in results.read() if row.split == "test"]


def _of(*sources: str) -> list[Row]:
    return [row for row in _test() if row.source in sources]


TABLES: Mapping[str, Callable[[], str]] = {
    "targets": lambda: targets(_test()),
    "overview": lambda: overview(_test()),
    "runs": lambda: each(_of("llmservingsim-vllm019", "llmservingsim-ispass26")),
    "curves": lambda: curves(_of("llmservingsim-vllm019", "llmservingsim-ispass26")),
    "mixed": lambda: each(_of("aiconfigurator #1150")),
    "worst": lambda: worst_cases(_test()),
    "unknowns": unknowns,
    "skipped": skipped,
    "impossible": lambda: impossible(_test()),
}


def _where(row: Row) -> str:
    return f"{row.model}, {row.device}{f' tp {row.tp}' if row.tp > 1 else ''}"


def _cost(name: str, fitted: bool) -> str:
    return f"{name}, fitted host" if fitted else name


def _both(found: Spread | None) -> str:
    return f"{found.size:.1%} ({found.sign:+.1%})" if found else NONE


def _value(metric: str, value: float) -> str:
    if metric == "throughput":
        return f"{value:,.0f} tok/s"
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"
