"""A card as a page: verdicts, and for each load a picture of where the arms are."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from math import isfinite

from experiments.cards.card import NOT, PARTLY, REPRODUCED, Card, Finding, Results

SHADES = {REPRODUCED: "#e3f4e6", PARTLY: "#fdf3d3", NOT: "#fbdedb"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1c2330;background:#fff}
table{border-collapse:collapse}td,th{padding:.35rem .7rem;border-bottom:1px solid #e1e5ec;text-align:left;
vertical-align:top}td span{padding:.05rem .45rem;border-radius:.3rem;white-space:nowrap;font-weight:600}
img{max-width:100%}pre{background:#f4f5f7;padding:.6rem;overflow-x:auto}small{color:#5a6474}
"""
DRAWN = (("mean_ttft_ms", "mean TTFT (ms)"), ("mean_tpot_ms", "mean TPOT (ms)"), ("mean_e2el_ms", "mean E2EL (ms)"))

SMALL = "A small version on a tiny model: it shows the way, and says nothing of the paper."


def command(card: Card, small: bool) -> str:
    return f"python -m experiments run {card.name}{' --small' if small else ''}"


def markdown(card: Card, findings: Sequence[Finding], small: bool, seeds: int) -> str:
    """The verdicts as a table, and how to run it again."""
    lines = [f"# {card.title}", "", card.source, "", f"`{command(card, small)}`, {seeds} seeds.", ""]
    if small:
        lines += [SMALL, ""]
    lines += [f"- {note}" for note in card.notes]
    lines += ["", "| claim | the paper | verdict | measured | baseline at its best |", "|---|---|---|---|---|"]
    for claim, finding in zip(card.claims, findings, strict=True):
        cells = (claim.name, claim.said, finding.verdict, finding.figure, finding.robust or "-")
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page(card: Card, found: Results, findings: Sequence[Finding], small: bool) -> str:
    """A whole document that needs nothing else."""
    rows = "".join(_row(claim.name, claim.said, finding) for claim, finding in zip(card.claims, findings, strict=True))
    notes = "".join(f"<li>{escape(note)}</li>" for note in card.notes)
    warning = (
        "<p><b>A small version on a tiny model: it shows the way, and says nothing of the paper.</b></p>"
        if small
        else ""
    )
    loads = {**card.loads, **card.small_loads} if small else card.loads
    pictures = "".join(f"<h2>{escape(load)}</h2>{_picture(card, found, load)}" for load in loads)
    settings = " ".join(map(shlex.quote, (*card.setting, *(card.small if small else ()))))
    head = f'<meta charset="utf-8"><title>{escape(card.name)}</title><style>{STYLE}</style>'
    table = f"<table><tr><th>claim</th><th>verdict</th><th>measured</th></tr>{rows}</table>"
    again = (
        f"<pre>{escape(command(card, small))}</pre><p><small>{escape(settings)}; {len(found.seeds)} seeds</small></p>"
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(card.title)}</h1>'
        f"<p>{escape(card.source)}</p>{warning}<ul>{notes}</ul>{table}{pictures}<h2>Again</h2>{again}</body></html>\n"
    )


def _row(name: str, said: str, finding: Finding) -> str:
    shade = SHADES.get(finding.verdict, "#eceff3")
    robust = f"<br><small>{escape(finding.robust)}</small>" if finding.robust else ""
    return (
        f"<tr><td><b>{escape(name)}</b><br><small>{escape(said)}</small></td>"
        f'<td><span style="background:{shade}">{finding.verdict}</span></td>'
        f"<td>{escape(finding.figure)}{robust}</td></tr>"
    )


def _picture(card: Card, found: Results, load: str) -> str:
    """Every arm's seeds and their mean, a panel a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = list(card.arms)
    figure = Figure(figsize=(12.5, 0.32 * len(arms) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (axis, (key, title)) in enumerate(zip(figure.subplots(1, len(DRAWN)), DRAWN, strict=True)):
        for place, arm in enumerate(arms):
            values = [value for seed in found.seeds if isfinite(value := found.value(arm, load, seed, key))]
            axis.plot(values, [place] * len(values), "o", color="#9fb8d6", markersize=4)
            if values:
                axis.plot(sum(values) / len(values), place, "D", color="#1c4f8f", markersize=5)
        axis.set(title=title, ylim=(len(arms) - 0.5, -0.5), yticks=range(len(arms)))
        axis.set_yticklabels(arms if number == 0 else [])
        axis.grid(axis="x", color="#e1e5ec")
        axis.locator_params(axis="x", nbins=5)
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return f"<img alt='{escape(load)}' src='data:image/png;base64,{b64encode(stream.getvalue()).decode()}'>"
