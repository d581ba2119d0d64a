"""Commands about runs that are over: `python -m experiments parity RUN_DIR ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.errors import explain
from experiments.parity import prove
from experiments.progress import waiting
from playground.check.parity import Divergence

PARITY = (
    "Replay runs through the simulator and compare every decision: those of backend=engine and backend=costed, and "
    "simulated ones made with backend.skip_ahead=false."
)


def main() -> int:
    """0: all decisions are identical. 1: they are not. 2: a folder that cannot be replayed."""
    arguments = _parser().parse_args()
    return max(_parity(folder) for folder in arguments.run_dirs)


def _parity(run_dir: Path) -> int:
    try:
        with waiting(f"{run_dir}: replaying"):
            report = prove(run_dir)
    except Divergence as divergence:
        print(f"{run_dir}: NOT identical: {divergence}", flush=True)
        return 1
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    print(f"{run_dir}: {report}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Commands about runs that are over.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parity = commands.add_parser(
        "parity", help="replay runs through the simulator and compare every decision", description=PARITY
    )
    parity.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
