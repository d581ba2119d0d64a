"""`python -m experiments regimes`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.conformance import shown
from experiments.errors import carried_out
from experiments.regimes.grid import DEPTHS, HOLDS, LOADS, MIXES, POLICIES, Grid
from experiments.regimes.page import NAMES, page, summary, tables
from experiments.regimes.survey import surveyed
from experiments.settings import SettingError
from experiments.trials import Overrides, Trials

BASE = ("model=llama-3.1-8b", "device=l20", "links=pcie4")
HELP = f"""\
Which policy wins where, by how much, and where nothing differs:

  python -m experiments regimes -o regimes                         the whole map; goes on after a stop
  python -m experiments regimes --mixes answers --depths 1 4 --loads 0.9 -o part
  python -m experiments regimes --each "policy=orca" "policy=chunked_prefill policy.budget.tokens=256" -o mine
  python -m experiments regimes --all model=qwen3-8b device=h200 -o h200

Axes: load against capacity, requests of mean length that the KV pool holds ({", ".join(HOLDS)}), pipeline stages, mix
of prompts and answers ({", ".join(MIXES)}). Policies serve the same requests; a policy loses in a cell if it has at
least 2 % more and the 95 % interval over seeds, widened for the number of comparisons, says so. FOLDER/regimes.html
shows it, FOLDER/regimes.json has the figures. What was found here: docs/regimes.md.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "regimes",
        help="a map: which policy wins where",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--loads", nargs="+", type=float, default=LOADS, metavar="SHARE", help="of the capacity (0.5 0.8 1.1)")
    add("--holds", nargs="+", default=list(HOLDS), metavar="NAME", help=f"of {', '.join(HOLDS)}")
    add("--depths", nargs="+", type=int, default=DEPTHS, metavar="STAGES", help="(1 2 4)")
    add("--mixes", nargs="+", default=list(MIXES), metavar="NAME", help=f"of {', '.join(MIXES)}")
    add("--each", nargs="+", metavar="OVERRIDES", help=f"policies; quote several overrides ({', '.join(POLICIES)})")
    add("--all", nargs="+", default=list(BASE), metavar="OVERRIDE", help=f"for all runs ({' '.join(BASE)})")
    add("--requests", type=int, default=150, help="of each run (150)")
    add("--seeds", type=int, default=5, help="seeds 0 to N-1 (5)")
    add("--workers", type=int, help="runs at a time (one a core)")
    add("-o", "--out", type=Path, default=Path("regimes"), metavar="FOLDER", help="for runs' figures and the map")
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: _map(given, more))


def _map(given: argparse.Namespace, more: Sequence[str]) -> int:
    if more:
        raise SettingError(f"{more[0]}: not known here; overrides go behind --all or --each")
    for name, least in (("seeds", 2), ("requests", 10)):
        if (value := getattr(given, name)) < least:
            raise SettingError(f"--{name} {value} must be at least {least}")
    policies = _policies(given.each)
    grid = Grid(given.loads, given.holds, given.depths, given.mixes)
    trials = Trials(given.out, given.workers)
    with shown("regimes") as progress:
        content = surveyed(
            grid,
            tuple(given.all),
            given.requests,
            given.seeds,
            trials,
            lambda done, total: progress(done, total, "runs"),
            policies,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    provenance.write(given.out / "regimes.json", content | provenance.facts())
    (given.out / "regimes.html").write_text(page(content), encoding="utf-8")
    print(told(content))
    print(f"Map: {given.out / 'regimes.html'}; figures: {given.out / 'regimes.json'}")
    return 0


def _policies(each: Sequence[str] | None) -> dict[str, Overrides]:
    if each is None:
        return dict(POLICIES)
    if len(set(each)) < 2:
        raise SettingError("--each: name two policies at least, to be compared")
    return {" ".join(word.partition("=")[2] or word for word in one.split()): tuple(one.split()) for one in each}


def told(content: dict[str, Any]) -> str:
    """For a terminal: what each metric says, and the table of the first."""
    parts = [f"{name}: " + " ".join(summary(content, key)) for key, name in NAMES.items()]
    first = next(iter(NAMES))
    return "\n".join([f"Best policies by {NAMES[first]} (in brackets: how much more the others have)", "",
                      tables(content, first), "", *parts])  # fmt: skip


def read(file: Path) -> dict[str, Any]:
    """A map that was kept."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{file}: cannot be read as a map: {error}") from error
    assert isinstance(content, dict)
    return content
