"""Accounts as one page that needs nothing else: a time line and a table for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.blame.account import CAUSES, Segment, culprits

if TYPE_CHECKING:
    from analysis.blame.command import Told

COLOURS = {
    "front end": "#9aa3b2", "step under way": "#c7b8dd", "other prompts": "#e07b39", "memory": "#c0392b",
    "seats": "#8e5bb5", "queue": "#d9a441", "held back": "#b0b98c", "host": "#6b7280", "device busy": "#4a5568",
    "own prompt": "#2f6fb3", "same step": "#f0b27a", "computed again": "#7b241c", "decode": "#5aa469",
    "beside prompts": "#eb984e", "turn": "#aab7b8", "left out": "#d35400",
}  # fmt: skip
WIDTH, HEIGHT = 1100, 34
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:74rem;margin:2rem auto;padding:0 1rem;color:#1c2330;background:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4rem 0 2rem}
td,th{padding:.2rem .7rem;border-bottom:1px solid #e3e7ee;text-align:right}td:first-child,td:last-child,th:last-child
{text-align:left}td{white-space:nowrap}td:last-child{white-space:normal}
svg{display:block;margin:.5rem 0}svg text{font:12px system-ui,sans-serif;fill:#566072}
.key{display:inline-block;width:.9em;height:.9em;border-radius:2px;margin-right:.5em;vertical-align:-.1em}
@media (prefers-color-scheme:dark){body{background:#14171c;color:#dfe4ec}td,th{border-color:#333a45}}
"""


def page(run: Path, found: Sequence[Told]) -> str:
    """A whole document."""
    body = "\n".join(_request(one) for one in found)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Where the time went</title>'
        f"<style>{STYLE}</style></head><body><h1>Where the time went</h1><p>{escape(str(run))}</p>{body}"
        "</body></html>\n"
    )


def _request(one: Told) -> str:
    row = one.row
    about = (
        f"came at {row['arrival']:.3f} s, {int(row['prompt_length'])} + {int(row['output_length'])} tokens, "
        f"TTFT {(one.first - row['arrival']) * 1e3:,.1f} ms, E2EL {row['e2el'] * 1e3:,.1f} ms, "
        f"slower than {one.rank:.0%}"
    )
    rows = "".join(_row(one, cause, before, after) for cause, before, after in one.parts())
    head = "<tr><th></th><th>to 1st token</th><th>after</th><th>share</th><th>whose doing</th></tr>"
    return f"<h2>Request {one.id}</h2><p>{escape(about)}</p>{_line(one)}<table>{head}{rows}</table>"


def _row(one: Told, cause: str, before: float, after: float) -> str:
    who = ", ".join(f"{id} ({seconds * 1e3:,.1f} ms)" for id, seconds in culprits(one.segments, cause))
    key = f'<span class="key" style="background:{COLOURS[cause]}"></span>'
    cells = [f"{seconds * 1e3:,.1f} ms" if seconds else "-" for seconds in (before, after)]
    share = f"{(before + after) / one.row['e2el']:.1%}"
    told = f"{CAUSES[cause]}: {who}" if who else CAUSES[cause]
    return (
        f"<tr><td>{key}{cause}</td><td>{cells[0]}</td><td>{cells[1]}</td><td>{share}</td><td>{escape(told)}</td></tr>"
    )


def _line(one: Told) -> str:
    """From arrival to end. Neighbours with the same cause are one bar, and what is too thin is merged into it."""
    begin, whole = float(one.row["arrival"]), float(one.row["e2el"])
    scale = WIDTH / whole if whole else 0.0
    bars = "".join(
        f'<rect x="{(bar.begin - begin) * scale:.2f}" width="{max(bar.seconds * scale, 0.3):.2f}" height="{HEIGHT}" '
        f'fill="{COLOURS[bar.cause]}"><title>{bar.cause}, {bar.seconds * 1e3:,.2f} ms at {bar.begin:.4f} s</title>'
        "</rect>"
        for bar in _bars(one.segments, 0.25 / scale if scale else 0.0)
    )
    at = (one.first - begin) * scale
    mark = (
        f'<path d="M{at:.1f} 0V{HEIGHT + 6}" stroke="currentColor"/><text x="{min(at + 4, WIDTH - 70):.1f}" '
        f'y="{HEIGHT + 16}">first token</text>'
    )
    return (
        f'<svg role="img" aria-label="time line of request {one.id}" viewBox="0 0 {WIDTH} {HEIGHT + 22}" '
        f'width="100%">{bars}{mark}</svg>'
    )


def _bars(segments: Sequence[Segment], least: float) -> Iterator[Segment]:
    """Segments for drawing: at most a few for each pixel, whatever the request's length."""
    held: list[Segment] = []
    for one in segments:
        if held and one.cause != held[-1].cause and one.end - held[0].begin > least:
            yield _merged(held)
            held = []
        held.append(one)
    if held:
        yield _merged(held)


def _merged(held: Sequence[Segment]) -> Segment:
    """One bar, of the cause that took most of it."""
    seconds: dict[str, float] = {}
    for one in held:
        seconds[one.cause] = seconds.get(one.cause, 0.0) + one.seconds
    return Segment(held[0].begin, held[-1].end, max(seconds, key=lambda cause: seconds[cause]))
