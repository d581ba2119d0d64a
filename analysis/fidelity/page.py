"""The report as one page that needs nothing else: tables, and pictures inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from analysis.fidelity import pictures
from analysis.fidelity.layers import LATENCIES
from analysis.fidelity.study import Pair
from analysis.fidelity.verdicts import REACHED, STEP_MAPE, THROUGHPUT, UNTESTABLE, allowed

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2330; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .5rem; }
p { color: #566072; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #e3e7ee; }
th { color: #566072; font-weight: 600; border-bottom: 2px solid #c9d0dc; }
th:first-child, td:first-child, .text { text-align: left; }
.good { background: #e3f4e6; } .fair { background: #fdf3d3; } .bad { background: #fbdedb; }
.tag { border-radius: .3rem; padding: .1rem .5rem; font-weight: 600; white-space: nowrap; }
img { max-width: 100%; }
details { margin: .4rem 0; }
summary { cursor: pointer; font-weight: 600; }
ul { margin: .2rem 0 .2rem 1.1rem; padding: 0; }
"""
TEXTS = ("target", "found", "metric", "otherwise")
COLUMNS = ("throughput", *(f"{name}_p{q}" for name in LATENCIES for q in (50, 90)))


def page(found: Mapping[str, Any], pairs: Sequence[Pair]) -> str:
    """A whole document."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Fidelity</title>",
        f"<style>{STYLE}</style></head><body>",
        _head(pairs),
        _targets(found["verdicts"]),
        _runs(found, pairs),
        _steps(found, pairs),
        _conclusion(found["conclusion"], pairs),
        _spread(found["spread"]),
        _decisions(found["decision"]),
        _details(found, pairs),
        "</body></html>",
    ]
    return "\n".join(parts)


def label(metric: str) -> str:
    """`ttft_p50` as TTFT P50."""
    name, _, quantile = metric.partition("_")
    return f"{name.upper()} {quantile.upper()}" if quantile else "req/s"


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    """Of cells that are HTML already."""
    titles = "".join(f"<th{' class=text' if title in TEXTS else ''}>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _cell(text: object, kind: str = "", title: str = "") -> str:
    marks = (f" class='{kind}'" if kind else "") + (f" title='{escape(title)}'" if title else "")
    return f"<td{marks}>{escape(str(text))}</td>"


def _shade(error: float, limit: float) -> str:
    size = abs(error)
    return "good" if size <= limit else "fair" if size <= 2 * limit else "bad"


def _head(pairs: Sequence[Pair]) -> str:
    first = pairs[0].about
    devices = sorted({str(pair.about["hardware"].get("device")) for pair in pairs})
    cost = first.get("cost", {})
    return (
        f"<h1>Simulation against hardware</h1><p>{len(pairs)} runs of "
        f"{escape(str(first['hardware'].get('model')))} on {escape(', '.join(devices))}; cost model "
        f"{escape(str(cost.get('model')))} <small>{escape(str(cost.get('file') or ''))}</small>. "
        "Errors are (simulated - hardware) / hardware.</p>"
    )


def _targets(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        kind = {REACHED: "good", UNTESTABLE: "fair"}.get(row["verdict"], "bad")
        verdict = f"<td><span class='tag {kind}'>{row['verdict']}</span></td>"
        found = f"<td class='text'>{escape(row['figure'])}{_missed(row['missed_by'])}</td>"
        body.append(verdict + _cell(row["target"], "text") + found)
    return "<h2>Targets</h2>" + _table(("", "target", "found"), body)


def _missed(names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li>{escape(name)}</li>" for name in names)
    return f"<details><summary>{len(names)} miss it</summary><ul>{items}</ul></details>"


def _runs(found: Mapping[str, Any], pairs: Sequence[Pair]) -> str:
    errors = {(row["name"], row["metric"]): row for row in found["trajectory"]}
    steps = {row["name"]: row for row in found["kernel"] if row["kind"] == "all"}
    body = []
    for pair in pairs:
        step = steps[pair.name]
        cells = [_cell(pair.name), _cell(f"{step['mape']:.1%}", _shade(step["mape"], STEP_MAPE))]
        cells.append(_cell(f"{step['steps']:,}"))
        for column in COLUMNS:
            row = errors[pair.name, column]
            limit = THROUGHPUT if column == "throughput" else allowed(pair, column, found["spread"])
            title = f"{row['hardware']:.4g} on hardware, {row['simulated']:.4g} simulated; allowed {limit:.1%}"
            cells.append(_cell(f"{row['error']:+.1%}", _shade(row["error"], limit), title))
        body.append("".join(cells))
    return (
        "<h2>Runs</h2><p>Steps: mean absolute error of single steps. Green: within what is allowed; yellow: within "
        "twice that. Figures themselves on hovering.</p>"
        + _table(("run", "steps", "count", *map(label, COLUMNS)), body)
        + pictures.errors(found)
    )


def _steps(found: Mapping[str, Any], pairs: Sequence[Pair]) -> str:
    gaps = {row["name"]: row for row in found["host_gaps"]}
    body = []
    for row in found["kernel"]:
        whole = row["kind"] == "all"
        name = _cell(row["name"]) if whole else f"<td>&emsp;{row['kind']}</td>"
        figures = [_cell(f"{row[key]:.1%}") for key in ("mape", "median", "p95")]
        figures += [_cell(f"{row[key]:+.1%}") for key in ("bias", "total")]
        gap = gaps[row["name"]]
        host = f"{gap['measured']:.2f} / {gap['predicted']:.2f} s" if whole else ""
        body.append("".join([name, _cell(f"{row['steps']:,}"), *figures, _cell(host)]))
    head = ("run", "steps", "MAPE", "median", "P95", "bias", "sum", "host between steps")
    every = f"<details><summary>By run and kind</summary>{_table(head, body)}</details>"
    return "<h2>Steps</h2>" + pictures.steps(pairs) + every


def _conclusion(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Pair]) -> str:
    if not rows:
        return "<h2>Conclusions</h2><p>No setting has two policies.</p>"
    body = []
    for row in rows:
        right = "" if not row["separated"] else "good" if row["agree"] == row["separated"] else "bad"
        tau = "-" if row["tau_separated"] is None else f"{row['tau_separated']:+.2f}"
        cells = [
            _cell(" / ".join(row["setting"])),
            _cell(label(row["metric"]), "text"),
            _cell(row["policies"]),
            _cell(f"{row['agree']} of {row['separated']}" if row["separated"] else "-", right),
            _cell(tau),
            _cell(f"{row['tau']:+.2f}"),
            _cell(f"{row['regret']:.1%}", _shade(row["regret"], 0.02)),
            _cell("; ".join(row["wrong"]), "text"),
        ]
        body.append("".join(cells))
    head = ("setting", "metric", "policies", "ordered alike", "tau", "tau, all", "regret", "otherwise")
    return (
        "<h2>Conclusions</h2><p>Pairs of policies that hardware separates by more than its own spread, and how many "
        "the simulation orders alike; Kendall's tau over these and over all; regret: what is lost by taking the policy "
        "that is best in simulation.</p>" + pictures.rankings(pairs) + _table(head, body)
    )


def _spread(spread: Mapping[str, Mapping[str, Any]]) -> str:
    own = {group: row["spread"] for group, row in spread.items() if row["of"] == [group]}
    if not own:
        return "<h2>The hardware's own spread</h2><p>No run was repeated: 1 % is taken.</p>"
    body = [
        _cell(group) + "".join(_cell(f"{values.get(column, 0.0):.1%}") for column in COLUMNS)
        for group, values in own.items()
    ]
    return (
        "<h2>The hardware's own spread</h2><p>Between repetitions of one run, as a share of their mean. Runs that were "
        "not repeated take that of the nearest.</p>" + _table(("run", *map(label, COLUMNS)), body)
    )


def _decisions(rows: Sequence[Mapping[str, Any]]) -> str:
    body = []
    for row in rows:
        same = ("identical", "good") if row["identical"] else ("differ", "bad")
        free = f"{row['free_running']:,} of {row['of']:,}"
        cells = [_cell(row["name"]), _cell(*same, "" if row["identical"] else row["text"])]
        body.append("".join([*cells, _cell(f"{row['steps']:,}"), _cell(free)]))
    return (
        "<h2>Decisions</h2><p>Replayed: the policy decides again at the recorded instants, with recorded step times. "
        "Free-running: steps until the simulation, on its own clock, first composes another one.</p>"
        + _table(("run", "replayed", "steps", "alike when free"), body)
    )


def _details(found: Mapping[str, Any], pairs: Sequence[Pair]) -> str:
    distances: dict[str, list[str]] = {}
    for row in found["distances"]:
        told = f"{row['metric'].upper()}: KS {row['ks']:.3f}, Wasserstein {row['wasserstein']:.1%} of the mean"
        distances.setdefault(row["name"], []).append(told)
    parts = [
        f"<details><summary>{escape(pair.name)}</summary><p>{'; '.join(distances[pair.name])}</p>"
        f"{pictures.courses(pair)}</details>"
        for pair in pairs
    ]
    return "<h2>Time lines and distributions</h2>" + "".join(parts)
