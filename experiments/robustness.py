"""Up to which error of the simulation a comparison of policies holds.

    python -m experiments.robustness --policies chunked_prefill vllm_v0 token_throttling -- workload=azure_conv ...

The same runs, made wrong on purpose: step times, prefills against decodes, single shapes, output lengths as policies
see them, age of load reports. The errors to hold against are those of docs/groundtruth.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module

from analysis.robustness import Finding, Scores, Trial, findings, ranking
from experiments import launcher, overrides, plugins, settings
from experiments.benchmarks.layout import table
from experiments.build import build
from experiments.groundtruth import results
from experiments.groundtruth.pool import Pool
from experiments.groundtruth.recorder import InMemory
from experiments.groundtruth.summary import best, spread
from experiments.perturbed import Errors, Overstated
from playground.loop import serve

METRICS = ("ttft", "tpot", "e2el")
STATISTICS = ("mean", "p50", "p90", "p99")
SIZES = (0.05, 0.1, 0.2, 0.4)
STALENESS = (0.1, 0.5, 2.0)
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Change:
    """One deliberate error."""

    kind: str
    size: float
    what: str
    errors: Errors = field(default_factory=Errors)
    overstated: float = 0.0
    staleness: float | None = None


NOTHING = Change("none", 0.0, "nothing")


@dataclass(frozen=True, slots=True)
class Run:
    """One policy under one change."""

    policy: str
    change: Change
    metric: str
    overrides: tuple[str, ...]


def main() -> None:
    """Print the ranking and, for each kind of error, up to which size it holds."""
    wanted = _parser().parse_args()
    changes = [NOTHING, *tried(wanted.errors, wanted.staleness)]
    with Pool(wanted.workers) as pool:
        baseline, trials = compare(wanted.policies, changes, wanted.metric, wanted.overrides, pool)
    print(told(wanted.metric, baseline, findings(baseline, trials), findings(baseline, trials, whole=True)))


def tried(sizes: Sequence[float], staleness: Sequence[float] = ()) -> Iterator[Change]:
    """Every kind of error in every size, with both signs where it has any."""
    for size in sizes:
        for error in (size, -size):
            yield Change("step times", size, f"all steps {error:+.0%}", Errors(error, error))
        for error in (size, -size):
            what = f"prefills {error:+.0%}, decodes {-error:+.0%}"
            yield Change("prefill against decode", size, what, Errors(error, -error))
        for seed in (0, 1):
            yield Change("single shapes", size, f"up to ±{size:.0%} by shape, seed {seed}", Errors(0, 0, size, seed))
        yield Change("output lengths shown", size, f"up to {size:+.0%} shown", overstated=size)
    for seconds in staleness:
        yield Change("load reports", seconds, f"{seconds:g} s old", staleness=seconds)


def compare(
    policies: Sequence[str], changes: Sequence[Change], metric: str, given: Sequence[str], pool: Pool
) -> tuple[Scores, list[Trial]]:
    """Scores without a change (the first of `changes`), and all others."""
    runs = [Run(policy, change, metric, tuple(given)) for change in changes for policy in policies]
    scores = iter(pool.map("runs", score, runs))
    by_change = [{policy: next(scores) for policy in policies} for _ in changes]
    trials = [Trial(c.kind, c.size, c.what, found) for c, found in zip(changes, by_change, strict=True)]
    return by_change[0], trials[1:]


def score(run: Run) -> float:
    """The metric of one run, in seconds."""
    settings.register()
    plugins.register()
    launcher.register()
    with initialize_config_module("conf", version_base="1.3"):
        given = ["run_dir=unused", *run.overrides, f"policy={run.policy}"]
        config = overrides.completing(lambda known: compose("config", known), given)
    wanted = settings.read(config)
    change, seed = run.change, wanted.seed
    if change.errors != Errors():
        wanted.backend = wanted.backend | {"cost": _wrong(wanted.backend["cost"], change.errors)}
    if change.staleness is not None:
        wanted.queueing = replace(wanted.queueing, report_interval=change.staleness)
    parts = build(wanted)
    source = Overstated(parts.source, change.overstated, seed) if change.overstated else parts.source
    recorder = InMemory()
    serve(source, parts.scheduler, parts.backend, recorder)
    return _statistic(recorder, run.metric)


def _wrong(cost: dict[str, Any], errors: Errors) -> dict[str, Any]:
    return {
        "_target_": "experiments.perturbed.perturbed",
        "_partial_": True,
        "inner": cost,
        "prefill": errors.prefill,
        "decode": errors.decode,
        "scatter": errors.scatter,
        "seed": errors.seed,
    }


def _statistic(run: InMemory, metric: str) -> float:
    statistic, _, name = metric.partition("_")
    values = getattr(run, name)
    return float(np.nanmean(values) if statistic == "mean" else np.nanpercentile(values, int(statistic[1:])))


def told(metric: str, baseline: Scores, winner: Sequence[Finding], whole: Sequence[Finding]) -> str:
    """For people."""
    best_one, *others = ranking(baseline)
    rows = [
        [
            one.kind,
            _size(one),
            one.broken_by or "nothing tried",
            _size(all_of_them),
            all_of_them.broken_by or "nothing tried",
            f"{one.tau:.2f}",
            f"{one.regret:.1%}",
        ]
        for one, all_of_them in zip(winner, whole, strict=True)
    ]
    head = ["error of", "winner holds up to", "broken by", "ranking holds up to", "broken by", "least τ", "regret"]
    scores = ", ".join(f"{name} {baseline[name]:.4g} s" for name in (best_one, *others))
    return f"{metric}: {scores}\n\n{table(head, rows)}\n\n{_conclusion(best_one, winner)}"


def _conclusion(best_one: str, winner: Sequence[Finding]) -> str:
    held = min(one.holds_up_to for one in winner if one.kind != "load reports")
    return f"The conclusion ({best_one} is best) holds up to ±{held:.0%} of what was tried. {_measured()}"


def _measured() -> str:
    """The error to hold this against."""
    rows = [row for row in best(results.read()) if row.split == "test" and row.load == "below saturation"]
    if (found := spread(rows, "tpot")) is None:
        return ""
    return f"Measured error of step times: median {found.size:.0%} (TPOT of {found.count} cases, docs/groundtruth.md)."


def _size(found: Finding) -> str:
    return f"{found.holds_up_to:g} s" if found.kind == "load reports" else f"±{found.holds_up_to:.0%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.robustness",
        description="Up to which error of the simulation a comparison of policies holds.",
    )
    parser.add_argument("--policies", nargs="+", required=True, metavar="POLICY", help="options of the group policy")
    parser.add_argument("--metric", default="mean_ttft", choices=[f"{s}_{m}" for m in METRICS for s in STATISTICS])
    parser.add_argument("--errors", nargs="+", type=float, default=SIZES, metavar="SHARE", help="0.1 is 10 %%")
    parser.add_argument("--staleness", nargs="*", type=float, default=(), metavar="SECONDS", help="with replicas only")
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core by default, 0: none")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="as for playground; after --")
    return parser


if __name__ == "__main__":
    main()
