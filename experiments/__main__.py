"""Commands about runs and sweeps that are there: `python -m experiments parity RUN_DIR ...`, `... bubbles RUN_DIR ...`,
`... resume SWEEP_DIR`; and `... fidelity`, which makes runs on hardware and their simulated twins.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.waiting import waiting
from experiments import bubbles, points, run
from experiments.adversary import command as adversary
from experiments.capacity import command as capacity
from experiments.cards import command as cards
from experiments.counterfactual import command as counterfactual
from experiments.errors import carried_out, explain
from experiments.evaluate import command as evaluate
from experiments.fidelity import command as fidelity
from experiments.mutants import command as mutants
from experiments.parity import prove
from experiments.regimes import command as regimes
from experiments.regret import command as regret
from experiments.settings import SettingError
from playground.check.parity import Divergence

COMMANDS = (cards, capacity, counterfactual, fidelity, mutants, regret, evaluate, adversary, regimes)
PARITY = (
    "Replay runs through the simulator and compare every decision: those of backend=engine and backend=costed, and "
    "simulated ones made with backend.skip_ahead=false."
)
BUBBLES = "Say of every pipeline stage for which share of a run's time it was at work, and what it waited for else."
RESUME = (
    "Go on with a sweep that was interrupted or killed: the same command in the same working directory, without the "
    "points that are finished. Those that failed are tried again."
)


def main(given: Sequence[str] | None = None) -> int:
    """0: all decisions are identical. 1: they are not. 2: a folder that cannot be replayed."""
    parser = _parser()
    arguments, more = parser.parse_known_args(given)
    if "obey" in arguments:  # a command with a module of its own
        return int(arguments.obey(arguments, more))
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if "sweep_dir" in arguments:
        return _resume(arguments.sweep_dir.resolve())
    do: Callable[[Path], int] = arguments.do
    return max(do(folder) for folder in arguments.run_dirs)


def _resume(folder: Path) -> int:
    """As the sweep's own command ends."""
    try:
        sweep = points.read(folder)
        os.chdir(sweep["cwd"])
    except (SettingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given = [argument for argument in sweep["command"] if not argument.startswith("hydra.sweep.dir=")]
    sys.argv = ["playground", *given, f"hydra.sweep.dir='{folder}'"]
    run.main()
    return 0


def _parity(run_dir: Path) -> int:
    return carried_out(lambda: _proved(run_dir), resumes=False)


def _proved(run_dir: Path) -> int:
    try:
        with waiting(f"{run_dir}: replaying"):
            report = prove(run_dir)
    except Divergence as divergence:
        print(f"{run_dir}: NOT identical: {divergence}", flush=True)
        return 1
    print(f"{run_dir}: {report}", flush=True)
    return 0


def _bubbles(run_dir: Path) -> int:
    try:
        bubbles.show(run_dir)
    except (SettingError, ValueError, OSError) as error:
        print(f"error: {explain(error) or error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description="Commands about runs and sweeps that are there."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parity = commands.add_parser(
        "parity", help="replay runs through the simulator and compare every decision", description=PARITY
    )
    parity.set_defaults(do=_parity)
    idle = commands.add_parser("bubbles", help="what pipeline stages waited for", description=BUBBLES)
    idle.set_defaults(do=_bubbles)
    for command in (parity, idle):
        command.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run")
    resume = commands.add_parser("resume", help="go on with a sweep that was interrupted", description=RESUME)
    resume.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR", help="the folder of a sweep")
    for module in COMMANDS:
        module.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
