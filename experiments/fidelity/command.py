"""`python -m experiments fidelity run | twin | record | guard`: runs of a plan on hardware, their simulated twins, and
records that hold the simulator to what it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from math import inf
from pathlib import Path

from experiments.errors import carried_out, tell
from experiments.fidelity import guard, hardware, plan
from experiments.fidelity.hardware import Served
from experiments.fidelity.plan import Point
from experiments.fidelity.twin import pair
from experiments.settings import SettingError

HELP = """\
How far the simulator is from the machine, in two steps here and one in `analysis`:

  python -m experiments fidelity run cpu -o study              the runs of a plan, on the machine
  python -m experiments fidelity twin -o study                 their twins: simulated, replayed, every step predicted
  python -m analysis fidelity study                            the report: tables, a page, a file for programs

  python -m experiments fidelity record -o kept -f study       some runs, small, with the simulator's errors on them
  python -m experiments fidelity guard kept                    whether today's simulator errs more on them

Every step goes on where it was interrupted. Plans are YAML files; those that ship are named without .yaml.
KEY=VALUE: as for `playground`, for every run. See docs/fidelity.md.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "fidelity",
        help="runs on hardware and their simulated twins",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(obey=obey)
    steps = parser.add_subparsers(required=True, metavar="run | twin | record | guard")
    serving = steps.add_parser("run", help="the runs of a plan, one after another")
    serving.set_defaults(fidelity=_run)
    serving.add_argument("plan", help="a YAML file, or the name of a plan that ships")
    serving.add_argument("words", nargs="*", metavar="KEY=VALUE", help="for every run: model=qwen3-0.6b ...")
    serving.add_argument("--budget", type=float, default=inf, metavar="SECONDS", help="begin nothing that ends later")
    serving.add_argument("--only", nargs="+", default=[], metavar="POINT", help="these points: names, or patterns (*)")
    serving.add_argument("--list", action="store_true", help="print the points and their overrides; run nothing")
    twins = steps.add_parser("twin", help="simulate, replay and predict what ran")
    twins.set_defaults(fidelity=_twin)
    twins.add_argument(
        "words",
        nargs="*",
        metavar="RUN_DIR | KEY=VALUE",
        help="folders of runs (default: all below STUDY/hardware); backend, device and links may be set",
    )
    twins.add_argument("--cost", default="calibrated", help="the cost model: an option of backend/cost (calibrated)")
    keeping = steps.add_parser("record", help="keep some runs, and the simulator's errors on them")
    keeping.set_defaults(fidelity=_record)
    keeping.add_argument("words", nargs="*", metavar="NAME | KEY=VALUE", help="runs (default: all), as for twin")
    keeping.add_argument("-f", "--of", type=Path, required=True, metavar="STUDY", help="the study that has them")
    keeping.add_argument("--cost", default="calibrated", help="the cost model: an option of backend/cost (calibrated)")
    keeping.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="for the record")
    guarding = steps.add_parser("guard", help="errors of today's simulator against the recorded ones; 1 if worse")
    guarding.set_defaults(fidelity=_guard)
    guarding.add_argument("words", nargs="*", metavar="FOLDER", help="records (default: all that ship)")
    for command in (serving, twins):
        command.add_argument("-o", "--out", type=Path, required=True, metavar="STUDY", help="the study's folder")


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: all done. 1: points are left that would not have ended in time, or errors grew. 2: something to mend. 130:
    interrupted.

    `more`: words that the parser left over, since options stood before them.
    """
    return carried_out(lambda: int(given.fidelity(given, [*given.words, *more])))


def _run(given: argparse.Namespace, words: Sequence[str]) -> int:
    patterns, late = _apart(given.only)  # which takes all words that follow
    others, overrides = _apart(words)
    if others:
        raise SettingError(f"{others[0]}: no KEY=VALUE; one plan is run at a time")
    overrides += late
    points = _chosen(plan.read(given.plan), patterns, given.plan)
    if given.list:
        print("\n".join(f"{point.name}: {' '.join([*point.overrides, *overrides])}" for point in points))
        return 0
    _prepare(given.out / "hardware")
    served = hardware.serve(points, given.out, overrides, given.budget)
    _tell(served, len(points), given.out / "hardware")
    return 2 if served.failed else 1 if served.left else 0


def _chosen(points: list[Point], patterns: Sequence[str], source: str) -> list[Point]:
    """Those that any of the patterns names, in the plan's order; all if there is no pattern."""
    for pattern in patterns:
        if not any(fnmatch(point.name, pattern) for point in points):
            raise SettingError(f"--only {pattern}: {source} has no such point; see them with --list")
    return [point for point in points if not patterns or any(fnmatch(point.name, pattern) for pattern in patterns)]


def _tell(served: Served, total: int, folder: Path) -> None:
    print(f"{len(served.done)} of {total} points are finished in {folder}")
    if served.failed:
        print(f"failed: {', '.join(served.failed)}; the same command tries them again")
    if served.left:
        print(f"left, for want of time: {', '.join(served.left)}; the same command goes on with them")


def _twin(given: argparse.Namespace, words: Sequence[str]) -> int:
    folders, overrides = _apart(words)
    runs = [Path(folder) for folder in folders] or hardware.finished(given.out)
    if not runs:
        raise SettingError(f"{given.out / 'hardware'}: no finished run; make some with: run PLAN -o {given.out}")
    _prepare(given.out / "pairs")
    code = 0
    for number, folder in enumerate(runs, 1):
        title = f"{number} of {len(runs)}"
        try:
            made = pair(folder, given.out, [f"backend/cost={given.cost}", *overrides], f"{title}: {folder.name}")
        except Exception as error:  # noqa: BLE001
            # One run that has no twin must not take the others with it.
            print(f"error: {folder}: {tell(error)}", file=sys.stderr)
            code = 2
            continue
        print(f"{title}: {made.folder}{'' if made.anew else ' was there'}", flush=True)
    return code


def _record(given: argparse.Namespace, words: Sequence[str]) -> int:
    names, overrides = _apart(words)
    cost = [f"backend/cost={given.cost}", *overrides]
    errors = guard.record(given.of, [Path(name).name for name in names], given.out, cost)
    print(f"{len(errors)} runs are kept in {given.out}: hold the simulator to them with: guard {given.out}")
    return 0


def _guard(given: argparse.Namespace, words: Sequence[str]) -> int:
    folders, overrides = _apart(words)
    if overrides:
        raise SettingError(f"{overrides[0]}: a record is compared with what it was made with; nothing may be set")
    worse = False
    for folder in map(Path, folders) if folders else sorted(guard.RECORDED.glob("*/")):
        figures = guard.compared(folder)
        print(f"{folder}\n{guard.told(figures)}\n", flush=True)
        worse = worse or any(figure.worse for figure in figures)
    return int(worse)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{folder}: {error.strerror}; choose a STUDY that you may write to") from error


def _apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Everything else, and overrides. A folder may have a = in its name."""
    for word in words:
        if word.startswith("-"):
            raise SettingError(f"{word}: no such option; see --help")
    overrides = [word for word in words if "=" in word and not Path(word).is_dir()]
    return [word for word in words if word not in overrides], overrides
