"""`python -m experiments evaluate my_policy.py:Class`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.errors import carried_out
from experiments.evaluate import contract
from experiments.evaluate.contract import METRICS, TIMEOUT, Evaluation, evaluate
from experiments.evaluate.suite import BASELINE, HELD_OUT, SPLITS, TRAIN
from experiments.settings import SettingError

HELP = f"""\
Scores a policy, for searches by program and for people:

  python -m experiments evaluate my_policy.py:Class
  python -m experiments evaluate package.module:make policy.rows=4
  python -m experiments evaluate policy=chunked_prefill policy.budget.tokens=256 --split held_out

The score is how many times as good as `{" ".join(BASELINE)}` it is in the metric: the geometric mean over cases and
seeds, each of the same requests. First the conformance kit examines it (a quarter of its cases): a policy that fails
scores nothing, and so does one that is told true output lengths, turns requests away, hangs or dies. It runs in a
process of its own with a time limit. Search with --split {TRAIN}; --split {HELD_OUT} has other recordings, hours and
seeds, is meant for a last word, and each look at it is counted. From Python:
`from experiments.evaluate import evaluate`.

Exit code: 0 it has a score, 1 it has none, 2 something to mend in the options. The last line is JSON.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="score a policy, guarded by the conformance kit",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("policy", help="my_policy.py:Class, package.module:Class or policy=NAME")
    add("options", nargs="*", metavar="policy.OPTION=VALUE", help="what it is made with")
    add("--split", choices=list(SPLITS), default=TRAIN, help=f"which cases ({TRAIN})")
    add("--metric", default="e2el_mean", metavar="METRIC", help=f"of {', '.join(METRICS)} (e2el_mean)")
    add("--seeds", type=int, default=3, help="of each case (3)")
    add("--excuse", nargs="+", default=[], metavar="PROPERTY", help="of the kit, which need not hold")
    add("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help=f"for all of it ({TIMEOUT:g})")
    add("--workers", type=int, help="runs at a time (one a core)")
    add("-o", "--out", type=Path, default=Path("runs/evaluate"), metavar="FOLDER", help="where looks are counted")
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: a score. 1: none. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: _score(given, more), resumes=False)


def _score(given: argparse.Namespace, more: Sequence[str]) -> int:
    if more:
        raise SettingError(f"{more[0]}: not known here; see --help")
    found = evaluate(
        given.policy,
        *given.options,
        split=given.split,
        metric=given.metric,
        seeds=given.seeds,
        excused=given.excuse,
        timeout=given.timeout,
        workers=given.workers,
        folder=given.out,
    )
    print(told(found))
    if given.split == HELD_OUT:
        print(f"look {contract.looks(given.out)} at held-out cases (counted in {given.out / contract.LOOKS})")
    print(json.dumps(asdict(found)))
    return 0 if found.score is not None else 1


def told(found: Evaluation) -> str:
    """For people."""
    if found.score is None:
        return f"{found.policy}: no score: {found.why}"
    bounds = "" if found.interval is None else f" [{found.interval[0]:.3f}, {found.interval[1]:.3f}]"
    lines = [f"{found.policy}: {found.score:.3f}{bounds} times as good in {found.metric} ({found.split})", ""]
    width = max(len(row["case"]) for row in found.cases)
    lines.append(f"{'':{width}} {'seed':>5} {'ms':>10} {'baseline':>10} {'times':>7}")
    lines += [
        f"{row['case']:{width}} {row['seed']:>5} {row['value']:>10.1f} {row['baseline']:>10.1f} {row['ratio']:>7.3f}"
        for row in found.cases
    ]
    return "\n".join(lines)
