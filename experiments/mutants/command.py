"""`python -m experiments mutants`: run the survey, keep it, print what it says."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments import provenance
from experiments.conformance import shown
from experiments.mutants.survey import DEAD, FOUND, HANGS, LAWFUL, UNASKED, WITHOUT, Result, drawn, survey

HELP = """\
Changes the built-in policies by chance, one small slip at a time (a comparison, a sign, a statement left out), and
examines each changed policy with the conformance kit. What the kit does not tell is either no disease (another policy,
as lawful as the first) or one that it cannot see: RESULT lists them, to be read. With --of core the slips are in what
policies decide with: scheduler, draft, pools of blocks. Nothing on the disk is changed: a process of its own is given
the changed source.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "mutants",
        help="changed policies against the conformance kit",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--of", choices=("policies", "core"), default="policies", help="what is changed (policies)")
    parser.add_argument("--count", type=int, default=60, help="mutants, spread over all modules (60)")
    parser.add_argument("--each", type=int, default=3, help="cases of every family (3, as --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants and of the cases (0)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="at a time (one a core)")
    parser.add_argument("-o", "--out", type=Path, default=Path("mutants.json"), metavar="RESULT")
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done, whatever was found."""
    results: list[Result] = []
    with shown("mutants") as progress:
        picked = drawn(given.of, given.count, given.seed)
        for result in survey(
            picked, given.each, given.seed, given.workers, lambda done, total: progress(done, total, "examined")
        ):
            results.append(result)
            _keep(results, given)
    print(told(results))
    print(f"Each of them: {given.out}")
    return 0


def _keep(results: Sequence[Result], given: argparse.Namespace) -> None:
    """After each: an interrupted survey is readable."""
    ordered = sorted(results, key=lambda one: (one.module, one.line, one.kind, one.before))
    about = {name: getattr(given, name) for name in ("of", "count", "each", "seed")}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    provenance.write(given.out, {**about, **provenance.facts(), "mutants": [asdict(one) for one in ordered]})


def told(results: Sequence[Result]) -> str:
    """Counts, and the mutants that nothing was said of."""
    counts = Counter(result.verdict for result in results)
    lines = [f"{counts[verdict]:4}  {verdict}" for verdict in (FOUND, HANGS, LAWFUL, WITHOUT, DEAD, UNASKED)]
    by = Counter(name for result in results for name in result.failed if result.verdict == FOUND)
    lines += ["", "found by: " + ", ".join(f"{name} {count}" for name, count in by.most_common())]
    for result in results:
        if result.verdict in (LAWFUL, HANGS):
            lines.append(
                f"{result.verdict}: {result.module}:{result.line} {result.owner}: {result.before}  =>  {result.after}"
            )
    return "\n".join(lines)
