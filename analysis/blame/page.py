"""Accounts as one page that needs nothing else: a time line and a table for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.blame.account import CAUSES, Segment

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
{text-align:left}th{white-space:nowrap}td{white-space:nowrap}td:last-child{white-space:normal}
svg{display:block;margin:.5rem 0}svg text{font:12px system-ui,sans-serif;fill:#7c8798}
.key{display:inline-block;width:.9em;height:.9em;border-radius:2px;margin-right:.5em;vertical-align:-.1em}
@media (prefers-color-scheme:dark){body{background:#14171c;color:#dfe4ec}td,th{border-color:#333a45}}
"""


def page(run: Path, found: Sequence[Told], together: str = "") -> str:
    """A whole document. `together`: what they have in common."""
    body = "\n".join(_request(one) for one in found)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Where the time went</title>'
        f"<style>{STYLE}</style></head><body><h1>Where the time went</h1>"
        f"<p>{escape(str(run))}</p>{_overview(found, together)}{body}"
        "</body></html>\n"
    )


def _overview(found: Sequence[Told], together: str) -> str:
    if len(found) < 2:
        return ""
    rows = "".join(
        f'<tr><td><a href="#r{one.id}">request {one.id}</a></td><td>{_ms(one.first - one.row["arrival"])}</td>'
        f"<td>{_ms(one.row['e2el'])}</td><td>{_mostly(one)}</td></tr>"
        for one in found
    )
    head = "<tr><th></th><th>TTFT</th><th>E2EL</th><th>mostly</th></tr>"
    return f"<p>{escape(together.capitalize())}</p><table>{head}{rows}</table>"


def _mostly(one: Told, most: int = 2) -> str:
    shares = sorted(((before + after, cause) for cause, before, after in one.parts()), reverse=True)
    return ", ".join(f"{cause} {seconds / one.row['e2el']:.0%}" for seconds, cause in shares[:most])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds else "-"


def _request(one: Told) -> str:
    row = one.row
    about = (
        f"came at {row['arrival']:.3f} s, {int(row['prompt_length'])} + {int(row['output_length'])} tokens, "
        f"TTFT {(one.first - row['arrival']) * 1e3:,.1f} ms, E2EL {row['e2el'] * 1e3:,.1f} ms, "
        f"slower than {one.rank:.0%}"
    )
    rows = "".join(_row(one, cause, before, after) for cause, before, after in one.parts())
    head = (
        "<tr><th></th><th>to 1st token</th><th>after</th><th>share</th><th>most in steps</th><th>whose doing</th></tr>"
    )
    title = f'<h2 id="r{one.id}">Request {one.id}</h2>'
    return f"{title}<p>{escape(about)}</p>{_line(one)}<table>{head}{rows}</table>"


def _row(one: Told, cause: str, before: float, after: float) -> str:
    who = one.whose(cause)
    key = f'<span class="key" style="background:{COLOURS[cause]}"></span>'
    cells = [_ms(before), _ms(after)]
    share = f"{(before + after) / one.row['e2el']:.1%}"
    told = f"{CAUSES[cause]}: {who}" if who else CAUSES[cause]
    return (
        f"<tr><td>{key}{cause}</td><td>{cells[0]}</td><td>{cells[1]}</td><td>{share}</td>"
        f"<td>{one.where(cause)}</td><td>{escape(told)}</td></tr>"
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
        f'<path d="M{at:.1f} 0V{HEIGHT + 24}" stroke="currentColor"/><text x="{min(at + 4, WIDTH - 70):.1f}" '
        f'y="{HEIGHT + 32}">first token</text>'
    )
    return (
        f'<svg role="img" aria-label="time line of request {one.id}" viewBox="0 0 {WIDTH} {HEIGHT + 36}" '
        f'width="100%">{bars}{_axis(whole)}{mark}</svg>'
    )


def _axis(whole: float, marks: int = 8) -> str:
    """Milliseconds since the arrival."""
    if not whole:
        return ""
    step = 10.0 ** floor(log10(whole / marks))
    step *= next((times for times in (1, 2, 5) if times * step * marks >= whole), 10)
    ticks = [place * step for place in range(int(whole / step) + 1)]
    return "".join(_tick(tick, tick / whole) for tick in ticks)


def _tick(seconds: float, share: float) -> str:
    at, anchor = share * WIDTH, "start" if not share else "end" if share > 0.97 else "middle"
    return (
        f'<path d="M{at:.1f} {HEIGHT}v5" stroke="#8d97a6"/>'
        f'<text x="{at:.1f}" y="{HEIGHT + 17}" text-anchor="{anchor}">{seconds * 1e3:,.4g} ms</text>'
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
