"""`python -m analysis report RUN|SWEEP`."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.files import write
from analysis.report.data import labels, read, runs_of
from analysis.report.page import page

HELP = """\
A run or a sweep as one HTML page that needs no network: figures and what they cannot say (lint), distributions of TTFT,
TPOT, ITL and E2EL; of a run its time lines (tokens, requests, KV, preemptions) and its stages, idle time coloured by
cause; of a sweep the runs side by side, with the Pareto front of TTFT and TPOT. Simulated runs beside others are
dashed.
Hover for values, drag to zoom, double click to see all.

  python -m analysis report RUN
  python -m analysis report SWEEP -o sweep.html
  python -m analysis report RUN OTHER_RUN -o both.html
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="a run or a sweep as one page",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN|SWEEP")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="(report.html in the first folder)")
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    found = [runs_of(folder) for folder in given.folders]
    folders = [folder for some in found for folder in some]
    names = [name for some in found for name in labels(some)]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    beside = len(folders) - 1
    runs = [read(folder, name, beside) for folder, name in zip(folders, names, strict=True)]
    out: Path = given.out or given.folders[0] / "report.html"
    title = f"{given.folders[0].resolve().name}" if len(given.folders) == 1 else f"{len(folders)} runs"
    content = page(title, runs)
    write(out, content)
    print(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {len(content) / 1e6:.1f} MB; open it in a browser")
    return 0
