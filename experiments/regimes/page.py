"""The map for people: one HTML page that needs nothing else, and tables for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from experiments.regimes.grid import HOLDS, MIXES
from experiments.regimes.survey import KEYS
from experiments.regimes.verdicts import Verdict, verdict

NAMES = {"mean_e2el_ms": "mean latency", "p90_ttft_ms": "p90 TTFT", "p90_tpot_ms": "p90 TPOT"}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
SAME = "#8a8a8a"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:84em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}.maps{display:flex;flex-wrap:wrap;gap:1.4em}.map{flex:1 1 24em}
h2{font-size:1.05em;margin:.2em 0}h3{font-size:.9em;font-weight:600;margin:.7em 0 .2em;color:#555}
table{border-collapse:separate;border-spacing:3px;width:100%;table-layout:fixed}
th{font-weight:400;font-size:.8em;color:#555;text-align:left}th.load{text-align:center}
td{height:3.3em;border-radius:4px;text-align:center;font-size:.82em;line-height:1.25;color:#111;padding:2px}
td small{display:block;font-size:.88em}th.row{width:5.2em}
.legend span{margin-right:1.4em;white-space:nowrap}.legend i{display:inline-block;width:1em;height:1em;
border-radius:3px;margin-right:.4em;vertical-align:-.15em}
nav{margin:1em 0}nav label{margin-right:1.2em;cursor:pointer}section{display:none}
@media (prefers-color-scheme:dark){body{background:#181818;color:#ddd}th,h3{color:#aaa}}
"""
SCRIPT = """
function show(id){for(const s of document.querySelectorAll("section"))s.style.display=s.id===id?"block":"none"}
"""


def verdicts(content: Mapping[str, Any], key: str) -> list[tuple[Mapping[str, Any], Verdict]]:
    """Each cell with what is to be said of it."""
    return [(cell, verdict(cell["figures"][key])) for cell in content["cells"]]


def summary(content: Mapping[str, Any], key: str) -> list[str]:
    """What the whole map says, in sentences."""
    found = [one for _, one in verdicts(content, key)]
    differing = [one for one in found if one.differs]
    alone = Counter(one.best for one in differing if len(one.winners) == 1)
    among = Counter(name for one in differing for name in one.winners)
    lines = [
        f"{len(found)} cells: in {len(found) - len(differing)} nothing differs, in {len(differing)} some policy is "
        "worse than the best.",
        "Among the best where something differs: "
        + ", ".join(f"{name} {among[name]} ({alone[name]} alone)" for name in content["policies"])
        + ".",
    ]
    if differing:
        worst = max(differing, key=lambda one: one.spread)
        loser = max(worst.others, key=lambda name: worst.others[name].ratio)
        cell = next(cell for cell, one in verdicts(content, key) if one == worst)
        lines.append(
            f"The most that a choice costs: {loser} has {worst.spread + 1:.2f} times the {NAMES[key]} of {worst.best} "
            f"at load {cell['load']:g}, {cell['holds']}, depth {cell['depth']}, {cell['mix']}."
        )
    return lines


# --- Markdown


def tables(content: Mapping[str, Any], key: str) -> str:
    """A table for each mix: rows are KV pressure and depth, columns are loads."""
    found = {(c["mix"], c["holds"], c["depth"], c["load"]): one for c, one in verdicts(content, key)}
    mixes, holds, depths, loads = _axes(content)
    parts = []
    for mix in mixes:
        head = f"**{_mix(mix)}**\n\n| KV | depth | " + " | ".join(f"load {load:g}" for load in loads) + " |"
        rule = "|---|---:|" + "---|" * len(loads)
        rows = [
            f"| {one} | {depth} | " + " | ".join(_words(found[mix, one, depth, load]) for load in loads) + " |"
            for one in holds
            for depth in depths
        ]
        parts.append("\n".join([head, rule, *rows]))
    return "\n\n".join(parts)


def _axes(content: Mapping[str, Any]) -> tuple[list[str], list[str], list[int], list[float]]:
    """In the order of the cells."""
    mixes, holds, depths, loads = (
        list(dict.fromkeys(cell[name] for cell in content["cells"])) for name in ("mix", "holds", "depth", "load")
    )
    return mixes, holds, depths, loads


def _words(one: Verdict) -> str:
    if not one.differs:
        return "–"
    return f"{', '.join(one.winners)} ({_lead(one)})"


def _lead(one: Verdict) -> str:
    """From the best of those that lost to the worst of them."""
    near, far = f"{one.lead:.0%}", f"{one.spread:.0%}"
    return near if near == far else f"{near} to {far}"


def _mix(name: str) -> str:
    mix = MIXES[name]
    return f"{name}: {mix.prompt} prompt tokens, {mix.output} of the answer, on average"


# --- HTML


def page(content: Mapping[str, Any]) -> str:
    """The whole map, by metric."""
    colours = dict(zip(content["policies"], COLOURS, strict=False))
    switches = "".join(
        f'<label><input type="radio" name="metric" id="m{number}"{" checked" if number == 0 else ""} '
        f"onchange=\"show('s{number}')\"> {NAMES[key]}</label>"
        for number, key in enumerate(KEYS)
    )
    sections = "".join(_section(content, key, colours, number) for number, key in enumerate(KEYS))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Regime map</title><style>{STYLE}</style>'
        f"<h1>Which policy wins where</h1><p>{escape(setting(content))}</p>{_legend(content, colours)}"
        f"<nav>{switches}</nav>{sections}<script>{SCRIPT}</script></html>\n"
    )


def setting(content: Mapping[str, Any]) -> str:
    """What all cells share."""
    held = ", ".join(f"{name} {'what the device has' if count is None else count}" for name, count in HOLDS.items())
    return (
        f"{' '.join(content['base']) or 'default settings'}; {content['requests']} requests a run, "
        f"{content['seeds']} seeds, the same requests for every policy. Load: against the reference policy's "
        f"throughput with all requests there at once. KV: requests of mean length that the pool holds ({held}). "
        "Depth: pipeline stages."
    )


def _legend(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    marks = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)} '
        f"<code>{escape(' '.join(content['policies'][name]))}</code></span> "
        for name, colour in colours.items()
    )
    same = f'<span><i style="background:{SAME};opacity:.4"></i>nothing differs</span>'
    return (
        f'<p class="legend">{marks}{same}</p><p>A cell has the colours of all policies that cannot be told from the '
        "best, and how much more the others have, the best of them to the worst. Stronger colour: more is lost.</p>"
    )


def _section(content: Mapping[str, Any], key: str, colours: Mapping[str, str], number: int) -> str:
    found = {(c["mix"], c["holds"], c["depth"], c["load"]): (c, one) for c, one in verdicts(content, key)}
    mixes, holds, depths, loads = _axes(content)
    told = "".join(f"<li>{escape(line)}</li>" for line in summary(content, key))
    maps = []
    for mix in mixes:
        panels = []
        for depth in depths:
            rows = "".join(
                f'<tr><th class="row">{escape(one)}</th>'
                + "".join(_cell(*found[mix, one, depth, load], colours) for load in loads)
                + "</tr>"
                for one in holds
            )
            heads = "".join(f'<th class="load">load {load:g}</th>' for load in loads)
            panels.append(f'<h3>depth {depth}</h3><table><tr><th class="row">KV</th>{heads}</tr>{rows}</table>')
        maps.append(f'<div class="map"><h2>{escape(_mix(mix))}</h2>{"".join(panels)}</div>')
    shown = " style=display:block" if number == 0 else ""
    return f'<section id="s{number}"{shown}><ul>{told}</ul><div class="maps">{"".join(maps)}</div></section>'


def _cell(cell: Mapping[str, Any], one: Verdict, colours: Mapping[str, str]) -> str:
    tip = escape("\n".join(_tip(cell, one)))
    if not one.differs:
        return f'<td title="{tip}" style="background:{SAME}40">nothing differs</td>'
    strength = 0.25 + 0.6 * min(1.0, one.spread)
    background = _stripes([_tinted(colours[name], strength) for name in one.winners])
    names = "<br>".join(escape(name) for name in one.winners[:2])
    if (more := len(one.winners) - 2) > 0:
        names += f" +{more}"
    return f'<td title="{tip}" style="background:{background}">{names}<small>{_lead(one)}</small></td>'


def _tip(cell: Mapping[str, Any], one: Verdict) -> Iterator[str]:
    yield f"{cell['rate']:g} requests/s"
    yield f"{one.best}: {one.value:,.1f} ms"
    for name, other in one.others.items():
        yield f"{name}: x {other.ratio:.3f} [{other.low:.3f}, {other.high:.3f}]"


def _stripes(colours: Sequence[str]) -> str:
    if len(colours) == 1:
        return colours[0]
    share = 100 / len(colours)
    stops = ", ".join(
        f"{colour} {number * share:.0f}% {(number + 1) * share:.0f}%" for number, colour in enumerate(colours)
    )
    return f"linear-gradient(90deg, {stops})"


def _tinted(colour: str, strength: float) -> str:
    """On white, so that text stays legible in a dark page, too."""
    parts = [round(255 - (255 - int(colour[place : place + 2], 16)) * strength) for place in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in parts)
