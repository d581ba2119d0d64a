"""`python -m experiments adversary --a policy=A --b policy=B`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.adversary.search import FRESH, Duel, Judged, Search, blame, judge
from experiments.adversary.space import SPACE, overrides, ranged, values
from experiments.build import Workload, make
from experiments.composing import composed
from experiments.errors import carried_out
from experiments.evaluate.contract import METRICS
from experiments.settings import SettingError
from experiments.trials import Trials
from playground.workload import saved

HELP = f"""\
Finds a plausible workload in which policy A loses most to policy B:

  python -m experiments adversary --a policy=vllm_v0 --b policy=chunked_prefill \\
      --all device=l20 kv.blocks=3000 --metric tpot_p90 -o adversary
  python -m experiments adversary --a policy=orca --b policy=vllm_v1 --range rate=1:4 burstiness=1 -o adversary

Searched are {", ".join(one.name for one in SPACE)}; --range narrows or widens one. A workload that B cannot serve
without a growing queue, or of which either turns requests away, does not count. What is found is confirmed on seeds
that the search did not see, and written as a file that replays: FOLDER/workload.jsonl. The same command goes on
after a stop.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "adversary",
        help="a plausible workload in which one policy loses most to another",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--a", nargs="+", required=True, metavar="OVERRIDE", help="the policy that is to lose")
    add("--b", nargs="+", required=True, metavar="OVERRIDE", help="the one it is to lose to")
    add("--all", nargs="+", default=[], metavar="OVERRIDE", help="for both: model, device, kv.blocks, ...")
    add("--metric", default="e2el_mean", metavar="METRIC", help=f"of {', '.join(METRICS)} (e2el_mean)")
    add("--range", nargs="+", default=[], metavar="NAME=LOW:HIGH", help="of a parameter")
    add("--size", type=int, default=16, help="points of a generation (16)")
    add("--generations", type=int, default=6, help="(6)")
    add("--requests", type=int, default=150, help="of each run (150)")
    add("--seeds", type=int, default=2, help="that points are judged on (2)")
    add("--fresh", type=int, default=8, help="seeds that confirm (8)")
    add("--seed", type=int, default=0, help="of the search (0)")
    add("--workers", type=int, help="runs at a time (one a core)")
    add("-o", "--out", type=Path, default=Path("adversary"), metavar="FOLDER", help="for runs' figures and the result")
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done, whether or not A loses. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: _search(given, more))


def _search(given: argparse.Namespace, more: Sequence[str]) -> int:
    if more:
        raise SettingError(f"{more[0]}: not known here; overrides go behind --a, --b or --all")
    search = _asked(given)
    best = search.run(lambda line: print(line, file=sys.stderr, flush=True))
    if best.loss == -inf:
        raise SettingError(best.why)
    fresh = range(FRESH, FRESH + given.fresh)
    (confirmed,) = judge(search.duel, search.space, [best.point], fresh, search.trials)
    hangs_on = blame(search, best.point)
    file = given.out / "workload.jsonl"
    _save(search, best, file)
    replayed = _replayed(search, file)
    content = _content(given, search, best, confirmed, hangs_on) | {"replayed": replayed}
    provenance.write(given.out / "adversary.json", content | provenance.facts())
    print(told(search, best, confirmed, hangs_on))
    print(f"Seed {FRESH} of it, as a file: {file}; replayed, A is at {replayed:.3f} times B")
    print(f"  playground {' '.join((*given.all, *given.a))} workload=saved workload.path={file}")
    return 0


def _asked(given: argparse.Namespace) -> Search:
    for name, least in (("size", 4), ("generations", 1), ("requests", 2), ("seeds", 1), ("fresh", 2), ("seed", 0)):
        if (value := getattr(given, name)) < least:
            raise SettingError(f"--{name} {value} must be at least {least}")
    if given.metric not in METRICS:
        raise SettingError(f"--metric {given.metric} must be one of {', '.join(METRICS)}")
    if strange := [word for word in given.all if word.startswith("workload")]:
        raise SettingError(f"--all {strange[0]}: the workload is what is searched; narrow it with --range")
    metric, statistic = given.metric.split("_")
    duel = Duel(tuple(given.a), tuple(given.b), tuple(given.all), f"{statistic}_{metric}_ms", given.requests)
    space = ranged(given.range)
    for both in duel.runs(space, (0.5,) * len(space), 0):
        composed(list(both))  # a wrong word is told before anything runs
    trials = Trials(given.out, given.workers)
    return Search(duel, space, trials, given.size, given.generations, range(given.seeds), given.seed)


def _save(search: Search, best: Judged, file: Path) -> None:
    """The requests of the first fresh seed."""
    config: Any = composed([*overrides(search.space, best.point, search.duel.requests), f"seed={FRESH}"])
    from omegaconf import OmegaConf

    workload: Workload = make("workload", OmegaConf.to_container(config.workload, resolve=True), Workload)
    saved.write(file, workload.draw(FRESH))  # type: ignore[attr-defined]


def _replayed(search: Search, file: Path) -> float:
    """A over B, of the requests in the file."""
    words = ("workload=saved", f"workload.path={file.resolve()}", f"seed={FRESH}")
    runs = [(*search.duel.base, *words, *policy) for policy in (search.duel.a, search.duel.b)]
    a, b = search.trials.run(runs)
    for trial in (a, b):
        if trial.problem:
            raise SettingError(f"{file}: {trial.problem}")
    return float(a.summary[search.duel.key] / b.summary[search.duel.key])


def told(search: Search, best: Judged, confirmed: Judged, hangs_on: dict[str, Judged]) -> str:
    """What was found, whether it holds, and what it hangs on."""
    duel = search.duel
    lines = [
        f"A: {' '.join(duel.a)}",
        f"B: {' '.join(duel.b)}",
        "",
        " ".join(f"{name}={value:g}" for name, value in values(search.space, best.point).items()),
        f"A's {duel.key} over B's: {best.ratio:.3f} on the seeds of the search ({len(best.logs)})",
        f"{'':17}{_confirmed(confirmed)}",
        "",
        "with one parameter back in the middle of its range:",
    ]
    for name, one in sorted(hangs_on.items(), key=lambda item: item[1].loss):
        lines.append(f"  {name:13} {_moved(one)}")
    out = sum(1 for one in search.judged if one.why)
    lines += ["", f"{len(search.judged)} workloads, {out} of them out of question; {len(search.trials)} runs"]
    return "\n".join(lines)


def _confirmed(one: Judged) -> str:
    if one.why:
        return f"not confirmed: on fresh seeds {one.why}"
    low, high = one.interval
    verdict = "confirmed" if low > 1 else "NOT confirmed (the interval holds 1)"
    bounds = "" if isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"{one.ratio:.3f}{bounds} on {len(one.logs)} fresh ones: {verdict}"


def _moved(one: Judged) -> str:
    return f"out of question: {one.why}" if one.why else f"{one.ratio:.3f}"


def _content(
    given: argparse.Namespace, search: Search, best: Judged, confirmed: Judged, hangs_on: dict[str, Judged]
) -> dict[str, Any]:
    def figures(one: Judged) -> dict[str, Any]:
        return {"values": values(search.space, one.point), "ratio": None if one.why else one.ratio, "why": one.why}

    return {
        "a": given.a,
        "b": given.b,
        "all": given.all,
        "metric": given.metric,
        "ranges": {one.name: [one.low, one.high] for one in search.space},
        "found": figures(best) | {"logs": list(best.logs)},
        "confirmed": figures(confirmed) | {"logs": list(confirmed.logs), "seeds": given.fresh, "first_seed": FRESH},
        "hangs_on": {name: figures(one) for name, one in hangs_on.items()},
        "overrides": list(overrides(search.space, best.point, search.duel.requests)),
        "workloads": [figures(one) for one in search.judged],
    }
