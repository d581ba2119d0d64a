"""`python -m experiments.fidelity`: runs on hardware, and their simulated twins beside them."""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path

from experiments.errors import explain
from experiments.fidelity import hardware, plan
from experiments.fidelity.twin import pair
from experiments.settings import SettingError

HELP = """\
How far the simulator is from the machine, in two steps here and one in `analysis`:

  python -m experiments.fidelity run cpu -o study              the runs of a plan, on the machine
  python -m experiments.fidelity twin -o study                 their twins: simulated, replayed, every step predicted
  python -m analysis fidelity study -o study/report            the report: tables, a page, a file for programs

Every step goes on where it was interrupted. Plans are YAML files; those that ship are named without .yaml.
"""


def main() -> int:
    """0: all done. 1: points are left that would not have ended in time. 2: something to mend."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.do(arguments))
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    points = [point for point in plan.read(given.plan) if not given.only or point.name in given.only]
    if not points:
        raise SettingError(f"--only {' '.join(given.only)}: {given.plan} has no such point")
    if given.list:
        print("\n".join(f"{point.name}: {' '.join(point.overrides)}" for point in points))
        return 0
    served = hardware.serve(points, given.out, given.override, given.budget)
    print(f"{len(served.done)} of {len(points)} points are finished in {given.out / 'hardware'}")
    if served.left:
        print(f"left, for want of time: {', '.join(served.left)}; the same command goes on with them")
    return 1 if served.left else 0


def _twin(given: argparse.Namespace) -> int:
    runs = given.run_dirs or sorted(file.parent for file in (given.out / "hardware").glob(f"*/{hardware.FINISHED}"))
    if not runs:
        raise SettingError(f"{given.out / 'hardware'}: no finished run; make some with: run PLAN -o {given.out}")
    for number, folder in enumerate(runs, 1):
        place = pair(folder, given.out, given.override)
        print(f"{number} of {len(runs)}: {place}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fidelity", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser("run", help="the runs of a plan, one after another")
    serving.set_defaults(do=_run)
    serving.add_argument("plan", help="a YAML file, or the name of a plan that ships")
    serving.add_argument("--budget", type=float, default=inf, metavar="SECONDS", help="begin nothing that ends later")
    serving.add_argument("--only", nargs="+", default=[], metavar="POINT", help="these points")
    serving.add_argument("--list", action="store_true", help="print the points and their overrides; run nothing")
    twins = commands.add_parser("twin", help="simulate, replay and predict what ran")
    twins.set_defaults(do=_twin)
    twins.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="default: all below STUDY/hardware")
    for command in (serving, twins):
        command.add_argument("-o", "--out", type=Path, required=True, metavar="STUDY", help="the study's folder")
        command.add_argument(
            "--override", nargs="+", default=[], metavar="KEY=VALUE", help="for every run: backend/cost=fitted ..."
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
