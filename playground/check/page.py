"""The report as one HTML page that needs nothing else; the worst case of a property is drawn as a time line."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import isnan

from playground.check.case import Case
from playground.check.examination import Verdict
from playground.check.serving import Outcome
from playground.core import Request, Step

COLUMNS = 160
"""Steps that are drawn."""
NARROW, WIDE, DRAWN = 7, 34, 1000
"""Pixels of a step at least and at most, and of all steps where they fit between."""
HEIGHT, LEFT, LEAST = 20, 150, 620
"""Pixels of a request, of the names on the left, and of a drawing's width at least."""
COLOURS = {"chunk": "#3b6fb6", "decode": "#7fbf7f", "wait": "#dcdcdc", "lost": "#c43b3b"}
LEGEND = {"chunk": "chunk of a prompt, its tokens", "decode": "decode", "wait": "waits", "lost": "loses its KV"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}
td.number{text-align:right}td.failed,td.passed,td.excused{white-space:nowrap}
td.failed{color:#b00020;font-weight:600}td.passed{color:#1b7a3d}tr.excused td{color:#777}
tr.failed td{background:#fdecec}
.drawn{overflow-x:auto}svg{background:#fff;border:1px solid #ddd;border-radius:4px}
svg text{font:12px system-ui,sans-serif;fill:#222}
.key{display:inline-block;width:1em;height:.8em;margin:0 .4em 0 1em}
pre{background:#f5f5f5;padding:.6em;overflow-x:auto}
@media (prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#262626}td,th{border-color:#444}
td.passed{color:#6fcf8f}td.failed{color:#ff8a8a}tr.failed td{background:#3a2020}}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One property as reports tell it. `status`: passed, failed or not asked."""

    name: str
    meaning: str
    status: str
    value: str
    told: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A case to draw: of which property, what it shows, and the command that plays it again."""

    name: str
    told: str
    case: Case
    outcome: Outcome
    command: str


def line(verdict: Verdict) -> Line:
    """A verdict in words."""
    status = "failed" if verdict.problem else "passed" if verdict.judged else "not asked"
    return Line(verdict.property.name, verdict.property.meaning, status, value(verdict), told(verdict))


def value(verdict: Verdict) -> str:
    """The worst number, with its unit."""
    if isnan(verdict.worst) or not verdict.property.unit:
        return ""
    return f"{verdict.worst:.3g} {verdict.property.unit}"


def told(verdict: Verdict) -> str:
    """What is wrong, else in how many cases it was asked."""
    if verdict.problem:
        return f"{verdict.problem} (fails in {verdict.failed} of {verdict.judged} cases)"
    return verdict.excused or (f"{verdict.judged} cases" if verdict.judged else "no case is about it")


ORDER = ("failed", "passed", "not asked")
"""What is to be mended comes first."""


def page(title: str, summary: str, lines: list[Line], drawings: list[Drawing]) -> str:
    """The whole page."""
    rows = "\n".join(_row(one) for one in sorted(lines, key=lambda one: ORDER.index(one.status)))
    drawn = "\n".join(_section(drawing) for drawing in drawings)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1><p>{escape(summary)}</p>
<table><tr><th>property</th><th></th><th>worst</th><th></th></tr>
{rows}
</table>
{drawn}
</body></html>
"""


def _row(one: Line) -> str:
    kind = {"not asked": "excused"}.get(one.status, one.status)
    return (
        f'<tr class="{kind}"><td><b>{escape(one.name)}</b><br>{escape(one.meaning)}</td>'
        f'<td class="{kind}">{one.status}</td>'
        f'<td class="number">{escape(one.value)}</td><td>{escape(one.told)}</td></tr>'
    )


def _section(drawing: Drawing) -> str:
    command = f"<pre>{escape(drawing.command)}</pre>" if drawing.command else ""
    return (
        f"<h2>{escape(drawing.name)}</h2><p>{escape(drawing.told)}<br>{escape(str(drawing.case))}</p>"
        f'<div class="drawn">{time_line(drawing.case, drawing.outcome)}</div><p>{_legend()}</p>{command}'
    )


def _legend() -> str:
    return "".join(
        f'<span class="key" style="background:{COLOURS[kind]}"></span>{text}' for kind, text in LEGEND.items()
    )


def time_line(case: Case, outcome: Outcome) -> str:
    """Requests downwards, steps to the right: blue chunks of prompts, green decodes, grey waiting, red: KV is lost.

    Every request of the case has its row: who was never served is what a stall is about.
    """
    steps = outcome.steps[:COLUMNS]
    requests = {request.id: request for request in case.requests}
    ids = sorted(requests)
    grid = Grid({id: number for number, id in enumerate(ids)}, _width(len(steps)), requests)
    waits = "".join(_waits(outcome, steps, id, grid) for id in ids)
    cells = "".join(_cells(step, column, grid) for column, step in enumerate(steps))
    losses = "".join(_losses(outcome, steps, grid))
    names = "".join(
        f'<text x="6" y="{HEIGHT * grid.rows[id] + 14}">{_named(outcome, requests[id])}</text>' for id in ids
    )
    body = HEIGHT * max(len(ids), 1)
    width = max(LEFT + grid.width * max(len(steps), 1) + 10, LEAST)
    return (
        f'<svg role="img" aria-label="time line" viewBox="0 0 {width} {body + 40}" width="{width}" '
        f'height="{body + 40}">{names}{waits}{cells}{losses}{_axis(outcome, steps, grid, body)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a request is drawn, by its id, and how wide a step is."""

    rows: dict[int, int]
    width: int
    requests: dict[int, Request]

    def left(self, column: int) -> int:
        return LEFT + self.width * column


def _width(steps: int) -> int:
    return min(max(DRAWN // max(steps, 1), NARROW), WIDE)


def _named(outcome: Outcome, request: Request) -> str:
    """Its number, and how long it is: prompt and answer, as far as it came; who has not ended has no answer yet."""
    ended = outcome.ended.get(request.id)
    return f"{request.id} ({request.prompt_length} + {ended.sequence.returned if ended else '?'})"


def _axis(outcome: Outcome, steps: list[Step], grid: Grid, top: int) -> str:
    """Every tenth step, or all of few."""
    every = 1 if grid.width >= 24 else 10
    ticks = "".join(
        f'<text x="{grid.left(column)}" y="{top + 16}">{step.id}</text>'
        for column, step in enumerate(steps)
        if column % every == 0
    )
    more = f" of {len(outcome.steps)}" if len(outcome.steps) > COLUMNS else ""
    return f'{ticks}<text x="6" y="{top + 34}">request (prompt + answer); {len(steps)} steps{more} to the right</text>'


def _waits(outcome: Outcome, steps: list[Step], id: int, grid: Grid) -> str:
    """From its arrival to its end; what it is served covers this."""
    ended = outcome.ended.get(id)
    arrival = grid.requests[id].arrival
    until = ended.finished if ended else float("inf")
    columns = [column for column, step in enumerate(steps) if arrival <= step.planned < until]
    if not columns:
        return ""
    x, width = grid.left(columns[0]), grid.width * (columns[-1] - columns[0] + 1)
    return f'<rect x="{x}" y="{HEIGHT * grid.rows[id] + 8}" width="{width}" height="4" fill="{COLOURS["wait"]}"/>'


def _cells(step: Step, column: int, grid: Grid) -> str:
    parts = step.columns
    return "".join(
        _cell(step, column, grid, id, length, _decodes(grid.requests[id], start, length, samples))
        for id, start, length, samples in zip(parts.sequence, parts.start, parts.length, parts.samples, strict=True)
    )


def _decodes(request: Request, start: int, length: int, samples: bool) -> bool:
    return length == 1 and samples and start >= request.prompt_length


def _cell(step: Step, column: int, grid: Grid, id: int, length: int, decodes: bool) -> str:
    x, y = grid.left(column), HEIGHT * grid.rows[id]
    box = (
        f'<rect x="{x}" y="{y + 2}" width="{grid.width - 1}" height="{HEIGHT - 4}" rx="2" '
        f'fill="{COLOURS["decode" if decodes else "chunk"]}">'
        f"<title>step {step.id} at {step.planned:g} s: {length} tokens of request {id}</title></rect>"
    )
    if decodes or grid.width < 8 * len(str(length)):
        return box
    return f'{box}<text x="{x + 3}" y="{y + 14}" style="fill:#fff;pointer-events:none">{length}</text>'


def _losses(outcome: Outcome, steps: list[Step], grid: Grid) -> list[str]:
    found = []
    for event in outcome.events:
        if event.kind in ("recompute", "swap") and event.sequence in grid.rows:
            column = next((number for number, step in enumerate(steps) if step.planned >= event.now), None)
            if column is not None:
                x, y, size = grid.left(column), HEIGHT * grid.rows[event.sequence] + 5, HEIGHT - 10
                mark = f'<path d="M{x} {y}l{size} {size}m0 {-size}l{-size} {size}"'
                found.append(f'{mark} stroke="{COLOURS["lost"]}" stroke-width="2"/>')
    return found
