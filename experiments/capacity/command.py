"""`python -m experiments capacity`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import inf, isfinite, isnan
from pathlib import Path

from analysis.intervals import over_seeds
from experiments import provenance
from experiments.capacity.find import Capacity, find
from experiments.capacity.objectives import Objective, objective
from experiments.composing import composed
from experiments.errors import carried_out
from experiments.settings import SettingError
from experiments.trials import Overrides, Trials

HELP = """\
The largest rate (requests a second) at which objectives hold, by policy:

  python -m experiments capacity --slo ttft_p90=0.5 tpot_p90=0.05 --each policy=vllm_v1 policy=orca -o capacity
  python -m experiments capacity --slo ttft_p90=0.5 --all model=qwen3-8b device=h200 workload.requests=1000 \\
      --each "policy=vllm_v1" "policy=chunked_prefill policy.budget.tokens=512" -o capacity

A rate holds if every objective does, nobody is turned away and the queue does not grow over the run (`analysis lint`,
saturated). It is bracketed by doubling and then halved on a logarithmic scale, for each seed by itself; requests of a
seed are the same for every policy and, but for their pace, at every rate, so that policies are compared in pairs. Runs
go side by side, one a core, and are kept in the folder: the same command goes on after a stop.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "capacity",
        help="the largest rate at which objectives hold",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--slo",
        nargs="+",
        required=True,
        metavar="OBJECTIVE",
        help="ttft_p90=SECONDS, tpot_mean=SECONDS, attainment=SHARE",
    )
    add(
        "--each",
        nargs="+",
        default=["policy=vllm_v1"],
        metavar="OVERRIDES",
        help="alternatives; quote several overrides",
    )
    add("--all", nargs="+", default=[], metavar="OVERRIDE", help="for all of them")
    add("--seeds", type=int, default=5, help="runs of each rate, seeds 0 to N-1 (5)")
    add("--start", type=float, default=1.0, metavar="RATE", help="where to begin (1)")
    add(
        "--tolerance", type=float, default=0.05, help="between the largest rate that holds and one that does not (0.05)"
    )
    add("--workers", type=int, help="runs at a time (one a core)")
    add(
        "-o",
        "--out",
        type=Path,
        default=Path("capacity"),
        metavar="FOLDER",
        help="for the runs' figures and the result",
    )
    parser.set_defaults(obey=obey)


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: _search(given, more))


def _search(given: argparse.Namespace, more: Sequence[str]) -> int:
    if words := [word for word in more if word != "--"]:
        raise SettingError(f"{words[0]}: not known here; overrides go behind --all or --each")
    objectives = tuple(map(objective, given.slo))
    if given.seeds < 1:
        raise SettingError(f"--seeds {given.seeds} must be at least 1")
    alternatives = {each: (*given.all, *each.split()) for each in given.each}
    for overrides in alternatives.values():
        _check(overrides)
    trials = Trials(given.out, given.workers)
    found = find(
        alternatives,
        objectives,
        range(given.seeds),
        trials,
        given.start,
        given.tolerance,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    _keep(given.out / "capacity.json", found, objectives, given)
    print(told(found, objectives))
    print(f"{len(trials)} runs; kept in {given.out}")
    return 0


def _check(overrides: Overrides) -> None:
    """What does not compose, or has no rate, is told before anything runs."""
    config = composed([*overrides, "workload.rate=1"])
    if config.workload.get("rate") is None:
        raise SettingError(f"{' '.join(overrides)}: its workload has no rate; take one that has, as workload=poisson")


def told(found: Sequence[Capacity], objectives: Sequence[Objective]) -> str:
    """A table; differences are paired by seed, against the first."""
    limits = ", ".join(f"{one.name} {'>=' if one.name == 'attainment' else '<='} {one.limit:g}" for one in objectives)
    width = max(len(one.name) for one in found)
    lines = [f"requests/s at which {limits}", ""]
    lines.append(f"{'':{width}} {'capacity':>9} {'95 %':>18} {'against the first':>26}  beyond it")
    for one in found:
        low, high = one.interval
        bounds = "-" if isnan(low) else f"[{low:.3g}, {high:.3g}]"
        missed = ", ".join(f"{word} ({count})" for word, count in one.missed.items())
        lines.append(f"{one.name:{width}} {_rate(one.mean):>9} {bounds:>18} {_against(one, found[0]):>26}  {missed}")
    if short := [one.name for one in found if any(rate == inf for rate in one.by_seed.values())]:
        lines.append(f"no limit was met, serve more requests (workload.requests=...): {', '.join(short)}")
    if never := [one.name for one in found if not all(one.by_seed.values())]:
        lines.append(f"nothing held, loosen --slo or lower --start: {', '.join(never)}")
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else "no limit"


def _against(one: Capacity, first: Capacity) -> str:
    """Mean ratio over seeds, with its 95 % interval."""
    if one is first or not all(first.by_seed.values()):
        return "-"
    ratios = [one.by_seed[seed] / rate for seed, rate in first.by_seed.items()]
    if not all(map(isfinite, ratios)):
        return "-"
    low, high = over_seeds(ratios)
    bounds = "" if isnan(low) else f" [{low:.3f}, {high:.3f}]"
    return f"x {sum(ratios) / len(ratios):.3f}{bounds}"


def _keep(file: Path, found: Sequence[Capacity], objectives: Sequence[Objective], given: argparse.Namespace) -> None:
    content = {
        "objectives": [asdict(one) for one in objectives],
        "start": given.start,
        "tolerance": given.tolerance,
        "all": given.all,
        "capacities": [
            {
                "name": one.name,
                "by_seed": {seed: rate if isfinite(rate) else None for seed, rate in one.by_seed.items()},
                "bracketed": one.found,
                "missed": one.missed,
            }
            for one in found
        ],
    }
    provenance.write(file, content | provenance.facts())
