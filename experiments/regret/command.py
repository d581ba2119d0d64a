"""`python -m experiments regret RUN | FILE | OVERRIDE ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments import provenance
from experiments.errors import carried_out
from experiments.regret import exact, rounds
from experiments.regret.compare import MEANINGS, Bound, Regret, compare
from experiments.regret.problem import METRICS
from experiments.settings import SettingError, Settings
from playground.core import Request

POLICIES = ("policy=mc_sf", "policy=vllm_v1", "policy=chunked_prefill", "policy=orca")
HELP = """\
What policies lose to the best schedule there could have been, had all arrivals and lengths been known:

  python -m experiments regret workload=poisson workload.requests=25 workload.rate=20 workload.max_length=256 \\
      kv.blocks=40 --each policy=mc_sf policy=vllm_v1
  python -m experiments regret requests.jsonl kv.blocks=40        a saved workload
  python -m experiments regret RUN_DIR --most 25                  the requests of a run, in its own memory

In rounds: every step takes one, whatever it holds, and requests come at whole ones (--round says how many seconds of
the workload make one; of a run, its mean step). KV blocks, seats and tokens a step are the simulator's. Up to 30
requests (--exact) an integer program finds the best schedule that neither pauses, nor preempts, nor cuts prompts; a
policy that does may beat it. For any policy, and any number, there is a bound from relaxations. The kind of a bound is
always told.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "regret",
        help="what policies lose to the best schedule there could have been",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="+", metavar="RUN|FILE|OVERRIDE", help="a run's folder, a saved workload, or KEY=VALUE")
    add("--each", nargs="+", metavar="OVERRIDES", help=f"policies; quote several overrides ({' '.join(POLICIES)})")
    add("--metric", choices=METRICS, default="latency", help="mean latency, mean TTFT, or makespan (latency)")
    add("--most", type=int, metavar="N", help="the first N requests only")
    add("--round", type=float, metavar="SECONDS", help="of the workload's time that make a round (0.05; a run's step)")
    add("--exact", type=int, default=exact.MOST, metavar="N", help=f"requests to solve for at most ({exact.MOST})")
    add("--seconds", type=float, default=60.0, help="for the integer program (60)")
    add("-o", "--out", type=Path, metavar="FILE", help="for the figures, as JSON")
    parser.set_defaults(obey=obey)


ROUND = 0.05


def obey(given: argparse.Namespace, more: Sequence[str]) -> int:
    """0: done. 2: something to mend. 130: interrupted."""
    return carried_out(lambda: _tell(given, more), resumes=False)


def _tell(given: argparse.Namespace, more: Sequence[str]) -> int:
    if more:
        raise SettingError(f"{more[0]}: not known here; see --help")
    _check(given)
    base, found, seconds, own = _setting(given)
    each = given.each or POLICIES
    wanted = own | {one: rounds.in_rounds([*base, *one.split()]) for one in each}
    regret = compare(
        given.metric,
        wanted,
        found,
        given.seconds,
        given.exact,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(told(regret, seconds))
    if given.out:
        provenance.write(given.out, content(regret, seconds, base) | provenance.facts())
        print(f"Figures: {given.out}")
    return 0


def _check(given: argparse.Namespace) -> None:
    for name, least in (("most", 1), ("exact", 0), ("round", 0), ("seconds", 0)):
        value = getattr(given, name)
        if value is not None and (value < least or (least == 0 and name != "exact" and value <= 0)):
            raise SettingError(f"--{name} {value:g} must be {'at least' if least else 'more than'} {least}")


def _setting(given: argparse.Namespace) -> tuple[list[str], list[Request], float, dict[str, Settings]]:
    """Overrides for all, the requests, the seconds of a round, and the policy that a run had."""
    places = [word for word in given.words if "=" not in word]
    overrides = [word for word in given.words if "=" in word]
    if len(places) > 1:
        raise SettingError(f"{places[1]}: name one run or one file; options are KEY=VALUE")
    for word in overrides:
        if word.startswith("policy"):
            raise SettingError(f"{word}: name policies with --each")
    if not places:
        base, seconds = overrides, given.round or ROUND
        return base, rounds.requests(rounds.in_rounds(base), seconds, given.most), seconds, {}
    place = Path(places[0])
    if place.is_dir():
        setting, policy, step = rounds.recorded(place)
        base, seconds = [*setting, *overrides], given.round or step
        own = rounds.in_rounds(base)
        own.policy = policy
        return base, rounds.served(place, seconds, given.most), seconds, {"as recorded": own}
    base, seconds = [*overrides, "workload=saved", f"workload.path={place}"], given.round or ROUND
    return base, rounds.requests(rounds.in_rounds(base), seconds, given.most), seconds, {}


def told(regret: Regret, seconds: float) -> str:
    """Bounds with their kinds, and a line for each policy."""
    room, width = regret.room, max(len(row.policy) for row in regret.rows)
    lines = [
        f"{_metric(regret.metric)} of {len(regret.jobs)} requests, in rounds (of {seconds:g} s of the workload); "
        f"{room.blocks} blocks of {room.block_size} tokens, {room.seats} seats, {room.tokens} tokens a step",
        "",
    ]
    lines += [f"bound {number}: {_bound(bound)}" for number, bound in enumerate(regret.bounds, 1)]
    heads = "".join(f" {f'regret {number}':>10} {f'ratio {number}':>8}" for number in range(1, len(regret.bounds) + 1))
    lines += ["", f"{'':{width}} {'rounds':>8}{heads} {'preempted':>10}"]
    for row in sorted(regret.rows, key=lambda row: row.value):
        figures = "".join(f" {row.regret(bound):>+10.2f} {row.ratio(bound):>8.3f}" for bound in regret.bounds)
        lines.append(f"{row.policy:{width}} {row.value:>8.2f}{figures} {row.losses:>10}")
    if beaten := [row.policy for row in regret.rows if row.regret(regret.bounds[0]) < -1e-9]:
        lines.append(f"below bound 1, which is of schedules without pauses: {', '.join(beaten)}")
    return "\n".join(lines)


def _metric(name: str) -> str:
    return {"latency": "mean latency", "ttft": "mean time to first token", "makespan": "makespan"}[name]


def _bound(bound: Bound) -> str:
    reached = "" if bound.reached in (None, bound.value) else f"; a schedule with {bound.reached:.2f} is known"
    return f"{bound.value:.2f}  {bound.kind}: {MEANINGS[bound.kind]}{reached}"


def content(regret: Regret, seconds: float, base: Sequence[str]) -> dict[str, object]:
    """For programs."""
    policies = [
        {
            "policy": row.policy,
            "rounds": row.value,
            "preemptions": row.losses,
            "regret": [row.regret(bound) for bound in regret.bounds],
            "ratio": [row.ratio(bound) for bound in regret.bounds],
        }
        for row in regret.rows
    ]
    return {
        "metric": regret.metric,
        "round_seconds": seconds,
        "overrides": list(base),
        "room": asdict(regret.room),
        "requests": [asdict(job) for job in regret.jobs],
        "bounds": [asdict(bound) | {"meaning": MEANINGS[bound.kind]} for bound in regret.bounds],
        "policies": policies,
    }
