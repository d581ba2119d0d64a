"""`python -m analysis fidelity STUDY`."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.fidelity.report import PAGE, report, told

HELP = """\
How far the simulator is from the hardware, in four layers: single steps, decisions, latencies and throughput over
whole runs, and the ranking of policies; beside the hardware's own spread over repetitions.

STUDY is made by `python -m experiments fidelity run ...` and `... twin ...`.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "fidelity",
        help="simulated runs against hardware runs",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, metavar="STUDY")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="DIR", help="for the page and the data (default: STUDY/report)"
    )
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    out = given.out or given.study / "report"
    print(told(report(given.study, out)))
    print(f"\nPage: {out / PAGE}")
    return 0
