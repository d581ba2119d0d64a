"""`python -m experiments.calibrate FOLDER ...`: fit what was measured once more, here or elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import report
from experiments.calibrate.conclude import conclude, table
from experiments.calibrate.tables import fitted_to_tables
from experiments.errors import explain
from experiments.settings import SettingError
from playground.sim.cost.profile import OWN, Profile


def main() -> int:
    """0: profiles are written. 2: a folder that holds no calibration, or too little of one."""
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.folders and not arguments.tables:
        parser.error("give the FOLDER of a calibration, or --tables PROFILE")
    try:
        for folder in arguments.folders:
            _refit(folder, arguments.runs, arguments.out)
        for file in arguments.tables:
            _straighten(file)
    except (SettingError, OSError) as error:
        print(f"error: {explain(error) or error}", file=sys.stderr)
        return 2
    return 0


def _refit(folder: Path, runs: Sequence[Path], root: Path) -> None:
    profile, place = conclude(folder, runs)
    profile.save(root / place)
    report.console().print(table(profile))
    print(f"{folder}: {root / place}")


def _straighten(file: Path) -> None:
    try:
        before = Profile.load(file)
    except ValueError as problem:
        raise SettingError(f"--tables: {problem}") from problem
    profile = fitted_to_tables(before)
    profile.save(file)
    assert profile.fitted is not None
    print(f"{file}: fitted to its own tables. How far off these it is, which is not how far off the device:")
    for name, found in profile.fitted.held_out.items():
        print(f"  {name:16}{found}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.calibrate",
        description="Fit profiles to what calibrations measured (playground +experiment=calibrate), and judge them.",
    )
    parser.add_argument(
        "folders", nargs="*", default=[], type=Path, metavar="FOLDER", help="the run_dir of a calibration"
    )
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], metavar="RUN_DIR", help="runs of the same engine to fit to, too"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=OWN, metavar="ROOT", help=f"where profiles are kept (default: {OWN})"
    )
    parser.add_argument(
        "--tables",
        nargs="+",
        type=Path,
        default=[],
        metavar="PROFILE",
        help="profiles that hold tables only, whose measurements are lost: fit a few coefficients to the tables",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
