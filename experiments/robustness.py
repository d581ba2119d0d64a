"""Up to which error of the simulation a comparison of policies holds.

    python -m experiments.robustness --policies chunked_prefill vllm_v0 token_throttling -- workload=azure_conv ...
    python -m experiments.robustness --policies chunked_prefill "chunked_prefill policy/order=sjf" -- ...

The same runs, made wrong on purpose: step times, prefills against decodes, single shapes, output lengths as policies
see them, lengths as policies predict them, age of load reports. The errors to hold against are those of
docs/groundtruth.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from analysis.robustness import Finding, Scores, Trial, findings, ranking
from experiments import launcher, overrides, plugins, settings
from experiments.benchmarks.layout import table
from experiments.build import build
from experiments.groundtruth import results
from experiments.groundtruth.pool import Pool
from experiments.groundtruth.recorder import InMemory
from experiments.groundtruth.summary import best
from experiments.perturbed import Errors, Overstated
from experiments.settings import Settings
from playground.loop import serve

METRICS = ("ttft", "tpot", "e2el")
STATISTICS = ("mean", "p50", "p90", "p99")
SIZES = (0.05, 0.1, 0.2, 0.4)
STALENESS = (0.1, 0.5, 2.0)
"""Seconds."""
NAMES = "options of the group policy; with overrides after one, in quotes"


@dataclass(frozen=True, slots=True)
class Change:
    """One deliberate error."""

    kind: str
    size: float
    what: str
    errors: Errors = field(default_factory=Errors)
    overstated: float = 0.0
    sigma: float = 0.0
    predicted: int = 0
    """Seed of the predictor whose errors have that `sigma`."""
    staleness: float | None = None


NOTHING = Change("none", 0.0, "nothing")


@dataclass(frozen=True, slots=True)
class Run:
    """One policy under one change. `policy`: an option of the group, and overrides after it, with spaces between."""

    policy: str
    change: Change
    metric: str
    overrides: tuple[str, ...]


def main() -> None:
    """Print the ranking and, for each kind of error, up to which size it holds."""
    parser = _parser()
    wanted = parser.parse_args()
    if wrong := [size for size in wanted.errors if not 0 < size < 1]:
        parser.error(f"--errors {wrong[0]:g} must lie between 0 and 1 (0.1 is 10 %)")
    changes = [NOTHING, *tried(wanted.errors, wanted.staleness, predict(wanted.policies, wanted.overrides))]
    with Pool(wanted.workers) as pool:
        baseline, trials = compare(wanted.policies, changes, wanted.metric, wanted.overrides, pool)
    print(told(wanted.metric, baseline, findings(baseline, trials), findings(baseline, trials, whole=True)))


def predict(policies: Sequence[str], given: Sequence[str]) -> bool:
    """Whether any of them goes by predicted lengths."""
    return any(_predicts(_wanted(Run(policy, NOTHING, "", tuple(given)))) for policy in policies)


def tried(sizes: Sequence[float], staleness: Sequence[float] = (), predicted: bool = False) -> Iterator[Change]:
    """Every kind of error in every size, with both signs where it has any. `predicted`: somebody predicts lengths."""
    for size in sizes:
        for error in (size, -size):
            yield Change("step times", size, f"all steps {error:+.0%}", Errors(error, error))
        for error in (size, -size):
            what = f"prefills {error:+.0%}, decodes {-error:+.0%}"
            yield Change("prefill against decode", size, what, Errors(error, -error))
        for seed in (0, 1):
            yield Change("single shapes", size, f"up to ±{size:.0%} by shape, seed {seed}", Errors(0, 0, size, seed))
        yield Change("output lengths shown", size, f"up to {size:+.0%} shown", overstated=size)
        for seed in (0, 1) if predicted else ():
            what = f"predictions by a factor of exp(±{size:g}), seed {seed}"
            yield Change("predicted lengths", size, what, sigma=size, predicted=seed)
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
    return _statistic(served(run), run.metric)


def served(run: Run) -> InMemory:
    """All that came of one run."""
    wanted, change = _wanted(run), run.change
    if change.errors != Errors():
        wanted.backend = wanted.backend | {"cost": _wrong(wanted.backend["cost"], change.errors)}
    if change.staleness is not None:
        wanted.queueing = replace(wanted.queueing, report_interval=change.staleness)
    if change.sigma and _predicts(wanted):
        wanted.policy["order"]["predictor"] |= {"sigma": change.sigma, "seed": change.predicted}
    parts = build(wanted)
    source = Overstated(parts.source, change.overstated, wanted.seed) if change.overstated else parts.source
    recorder = InMemory()
    serve(source, parts.scheduler, parts.backend, recorder)
    return recorder


def _wanted(run: Run) -> Settings:
    """Made anew, to be changed."""
    return settings.read(_composed(run.policy, run.overrides))


@cache
def _composed(policy: str, given: tuple[str, ...]) -> DictConfig:
    for registering in (settings, plugins, launcher):
        registering.register()
    name, *choices = policy.split()
    with initialize_config_module("conf", version_base="1.3"):
        arguments = ["run_dir=unused", *given, f"policy={name}", *choices]
        return overrides.completing(lambda known: compose("config", known), arguments)


def _predicts(wanted: Settings) -> bool:
    return "predictor" in wanted.policy.get("order", {})


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
    if not (sizes := measured_errors("tpot")):
        return ""
    middle, ninth = np.percentile(sizes, (50, 90))
    return (
        f"Measured error of step times: median {middle:.0%}, in nine of ten cases below {ninth:.0%} (TPOT of "
        f"{len(sizes)} cases, docs/groundtruth.md)."
    )


def measured_errors(metric: str) -> list[float]:
    """Sizes of the errors of all test cases below saturation."""
    rows = [row for row in best(results.read()) if row.split == "test" and row.load == "below saturation"]
    return [abs(row.errors[metric]) for row in rows if metric in row.errors and metric not in row.impossible]


def _size(found: Finding) -> str:
    return f"{found.holds_up_to:g} s" if found.kind == "load reports" else f"±{found.holds_up_to:.0%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.robustness",
        description="Up to which error of the simulation a comparison of policies holds.",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        required=True,
        metavar="POLICY",
        help="options of the group policy, each with overrides if quoted",
    )
    parser.add_argument("--metric", default="mean_ttft", choices=[f"{s}_{m}" for m in METRICS for s in STATISTICS])
    parser.add_argument("--errors", nargs="+", type=float, default=SIZES, metavar="SHARE", help="0.1 is 10 %%")
    parser.add_argument("--staleness", nargs="*", type=float, default=(), metavar="SECONDS", help="with replicas only")
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core by default, 0: none")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="as for playground; after --")
    return parser


if __name__ == "__main__":
    main()
