"""`python -m analysis blame RUN (--request ID | --worst N)`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from analysis.blame.account import CAUSES, Segment, Trace, account, culprits, longest, read, sums
from analysis.blame.page import page
from analysis.files import write, write_json

METRICS = ("ttft", "tpot", "e2el")
DATA = 10
"""Requests and steps that a file names for each cause."""
HELP = """\
Where a request's time went, and whose doing it was. Every moment from its arrival to its end has one cause, so that
the parts sum to what was measured: waiting (and why it was not let in: other prompts, memory, seats, the queue, the
policy), its own prompt, others in the same step, tokens computed again, decodes, what others' prompts added to them,
steps that left it out, the host. All of it follows from the trace.

  python -m analysis blame RUN --worst 5                 the five with the longest E2EL
  python -m analysis blame RUN --worst 5 --metric ttft
  python -m analysis blame RUN --request 17 --request 21 --html blame.html
"""


@dataclass(frozen=True, slots=True)
class Told:
    """One request's account. Latencies in seconds; `rank`: how many of all were at most as slow, as a share."""

    id: int
    row: Any
    segments: list[Segment]
    rank: float

    @property
    def first(self) -> float:
        """When its first token was there; its end if it got none."""
        first = float(self.row["first_token"])
        return first if first == first else float(self.row["finished"])

    def parts(self) -> list[tuple[str, float, float]]:
        """(cause, seconds until the first token, seconds after it)"""
        before, after = sums(self.segments, -inf, self.first), sums(self.segments, self.first, inf)
        return [
            (cause, before.get(cause, 0.0), after.get(cause, 0.0)) for cause in CAUSES if cause in {**before, **after}
        ]

    def whose(self, cause: str) -> str:
        """The requests that took most of it; empty if it was nobody's doing."""
        return ", ".join(f"{id} ({seconds * 1e3:,.1f} ms)" for id, seconds in culprits(self.segments, cause))

    def where(self, cause: str) -> str:
        """The steps that took most of it."""
        return ", ".join(str(step) for step, _ in longest(self.segments, cause))


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "blame",
        help="where a request's time went, and whose doing it was",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--request", type=int, action="append", metavar="ID", help="this one (may be repeated)")
    which.add_argument("--worst", type=int, metavar="N", help="the slowest")
    parser.add_argument("--metric", choices=METRICS, default="e2el", help="by which they are the slowest (e2el)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same as data, segment by segment")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the same as a page with time lines")
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    if given.worst is not None and given.worst < 1:
        raise ValueError(f"--worst {given.worst} must be at least 1")
    run = read(given.run)
    found = [_told(run, id, given.metric) for id in _chosen(run, given)]
    print("\n\n".join(_shown(one) for one in found))
    if together := _together(found):
        print(f"\n{together}")
    if given.json:
        write_json(given.json, [_data(one) for one in found])
    if given.html:
        write(given.html, page(run.folder, found, together))
        print(f"\nPage: {given.html}")
    return 0


def _chosen(run: Trace, given: argparse.Namespace) -> Sequence[int]:
    if given.request:
        return list(given.request)
    served = run.requests[run.requests["outcome"] == "finished"].dropna(subset=[given.metric])
    order = served.sort_values([given.metric, "id"], ascending=[False, True])
    return [int(id) for id in order["id"].head(given.worst)]


def _told(run: Trace, id: int, metric: str) -> Told:
    segments = account(run, id)
    row = run.requests.loc[id]
    values = run.requests.loc[run.requests["outcome"] == "finished", metric].dropna()
    return Told(id, row, segments, float((values <= row[metric]).mean()) if len(values) else 1.0)


def _shown(one: Told) -> str:
    """For a terminal."""
    row = one.row
    told = [f"{name.upper()} {row[name] * 1e3:,.1f} ms" for name in METRICS if row[name] == row[name]]
    times = f", preempted {int(row['preemptions'])} times" if row["preemptions"] else ""
    tokens = f"{int(row['prompt_length'])} + {int(row['output_length'])} tokens"
    lines = [
        f"request {one.id}: came at {row['arrival']:.3f} s, {tokens}, {row['outcome']}{times}; {', '.join(told)}; "
        f"slower than {one.rank:.0%}",
        f"  {'':15} {'to 1st token':>13} {'after':>11} {'share':>6}  {'most in steps':22} whose doing",
    ]
    whole = float(row["e2el"])
    for cause, before, after in one.parts():
        who = one.whose(cause)
        lines.append(
            f"  {cause:15} {_ms(before):>13} {_ms(after):>11} {(before + after) / whole:>6.1%}  "
            f"{one.where(cause):22} {who or CAUSES[cause]}"
        )
    before, after = one.first - float(row["arrival"]), float(row["finished"]) - one.first
    lines.append(f"  {'sum':15} {_ms(before):>13} {_ms(after):>11}")
    return "\n".join(lines)


def _together(found: Sequence[Told]) -> str:
    """What several have in common; empty if there is one."""
    if len(found) < 2:
        return ""
    whole = sum(float(one.row["e2el"]) for one in found)
    totals = {
        cause: sum(before + after for one in found for name, before, after in one.parts() if name == cause)
        for cause in CAUSES
    }
    order = sorted(((seconds, cause) for cause, seconds in totals.items() if seconds), reverse=True)
    told = ", ".join(f"{cause} {seconds / whole:.0%}" for seconds, cause in order if seconds >= 0.005 * whole)
    return f"together: {told}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds else "-"


def _data(one: Told) -> dict[str, Any]:
    latencies = {name: float(one.row[name]) if one.row[name] == one.row[name] else None for name in METRICS}
    return {
        "request": one.id,
        "arrival": float(one.row["arrival"]),
        "finished": float(one.row["finished"]),
        **latencies,
        "parts": [_part(one, *part) for part in one.parts()],
        "segments": [segment._asdict() for segment in one.segments],
    }


def _part(one: Told, cause: str, before: float, after: float) -> dict[str, Any]:
    return {
        "cause": cause,
        "to_first_token": before,
        "after": after,
        "requests": [{"request": id, "seconds": seconds} for id, seconds in culprits(one.segments, cause, DATA)],
        "steps": [{"step": step, "seconds": seconds} for step, seconds in longest(one.segments, cause, DATA)],
    }
