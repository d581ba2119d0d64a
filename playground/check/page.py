"""The report as one HTML page that needs nothing else; the worst case of a property is drawn as a time line."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import isnan

from playground.check.case import Case
from playground.check.examination import Verdict
from playground.check.serving import Outcome
from playground.core import Step

COLUMNS = 160
"""Steps that are drawn."""
WIDTH, HEIGHT, LEFT = 7, 14, 120
"""Pixels of a step, of a request, and of the names on the left."""
COLOURS = {"chunk": "#3b6fb6", "decode": "#8fc58f", "wait": "#e3e3e3", "lost": "#c43b3b"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}
td.number{text-align:right}.failed{color:#b00020;font-weight:600}.passed{color:#1b7a3d}.excused{color:#777}
svg{background:#fff;border:1px solid #ddd;overflow-x:auto}pre{background:#f5f5f5;padding:.6em;overflow-x:auto}
@media (prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#262626}td,th{border-color:#444}}
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


def page(title: str, summary: str, lines: list[Line], drawings: list[Drawing]) -> str:
    """The whole page."""
    rows = "\n".join(_row(one) for one in lines)
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
        f'<tr><td><b>{escape(one.name)}</b><br>{escape(one.meaning)}</td><td class="{kind}">{one.status}</td>'
        f'<td class="number">{escape(one.value)}</td><td>{escape(one.told)}</td></tr>'
    )


def _section(drawing: Drawing) -> str:
    return (
        f"<h2>{escape(drawing.name)}</h2><p>{escape(drawing.told)}<br>{escape(str(drawing.case))}</p>"
        f"{time_line(drawing.outcome)}<pre>{escape(drawing.command)}</pre>"
    )


def time_line(outcome: Outcome) -> str:
    """Requests downwards, steps to the right: blue chunks of prompts, green decodes, grey waiting, red: KV is lost."""
    steps = outcome.steps[:COLUMNS]
    ids = sorted({id for step in outcome.steps for id in step.columns.sequence} | set(outcome.ended))
    place = {id: number for number, id in enumerate(ids)}
    waits = "".join(_waits(outcome, steps, id, place[id]) for id in ids)
    cells = "".join(_cells(step, column, place) for column, step in enumerate(steps))
    losses = "".join(_losses(outcome, steps, place))
    names = "".join(f'<text x="4" y="{HEIGHT * place[id] + 11}" font-size="11">request {id}</text>' for id in ids)
    width, height = LEFT + WIDTH * max(len(steps), 1), HEIGHT * max(len(ids), 1) + 20
    more = f" of {len(outcome.steps)}" if len(outcome.steps) > COLUMNS else ""
    axis = f'<text x="{LEFT}" y="{height - 5}" font-size="11">{len(steps)} steps{more}, to the right</text>'
    return (
        f'<svg role="img" aria-label="time line" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{names}{waits}{cells}{losses}{axis}</svg>"
    )


def _waits(outcome: Outcome, steps: list[Step], id: int, row: int) -> str:
    """From its arrival to its end; what it is served covers this."""
    ended = outcome.ended.get(id)
    arrival = ended.request.arrival if ended else 0.0
    until = ended.finished if ended else float("inf")
    columns = [column for column, step in enumerate(steps) if arrival <= step.planned < until]
    if not columns:
        return ""
    x, width = LEFT + WIDTH * columns[0], WIDTH * (columns[-1] - columns[0] + 1)
    return f'<rect x="{x}" y="{HEIGHT * row + 5}" width="{width}" height="4" fill="{COLOURS["wait"]}"/>'


def _cells(step: Step, column: int, place: dict[int, int]) -> str:
    return "".join(
        _cell(column, place[id], COLOURS["decode" if length == 1 and samples else "chunk"])
        + f"<title>step {step.id} at {step.planned:g} s: {length} tokens of request {id}</title></rect>"
        for id, length, samples in zip(step.columns.sequence, step.columns.length, step.columns.samples, strict=True)
    )


def _cell(column: int, row: int, colour: str) -> str:
    return (
        f'<rect x="{LEFT + WIDTH * column}" y="{HEIGHT * row + 2}" width="{WIDTH - 1}" height="{HEIGHT - 4}" '
        f'fill="{colour}">'
    )


def _losses(outcome: Outcome, steps: list[Step], place: dict[int, int]) -> list[str]:
    found = []
    for event in outcome.events:
        if event.kind in ("recompute", "swap") and event.sequence in place:
            column = next((number for number, step in enumerate(steps) if step.planned >= event.now), None)
            if column is not None:
                x, y = LEFT + WIDTH * column, HEIGHT * place[event.sequence]
                mark = f'<path d="M{x} {y + 2}l{WIDTH} {HEIGHT - 4}m0 {4 - HEIGHT}l{-WIDTH} {HEIGHT - 4}"'
                found.append(f'{mark} stroke="{COLOURS["lost"]}" stroke-width="2"/>')
    return found
