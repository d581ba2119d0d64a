"""`python -m experiments.calibrate FOLDER ...`: fit what was measured once more, here or elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments import report
from experiments.calibrate.conclude import conclude, table
from experiments.errors import explain
from experiments.settings import SettingError
from playground.sim.cost.profile import OWN


def main() -> int:
    """0: profiles are written. 2: a folder that holds no calibration, or too little of one."""
    arguments = _parser().parse_args()
    for folder in arguments.folders:
        try:
            profile, place = conclude(folder, arguments.runs)
            profile.save(arguments.out / place)
        except (SettingError, ValueError, OSError) as error:
            print(f"error: {explain(error) or error}", file=sys.stderr)
            return 2
        report.console().print(table(profile))
        print(f"{folder}: {arguments.out / place}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.calibrate",
        description="Fit profiles to what calibrations measured (playground +experiment=calibrate), and judge them.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the run_dir of a calibration")
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], metavar="RUN_DIR", help="runs of the same engine to fit to, too"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=OWN, metavar="ROOT", help=f"where profiles are kept (default: {OWN})"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
