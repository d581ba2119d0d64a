"""Comparisons of policies whose robustness is recorded: python -m experiments.conclusions [STUDY ...] [--workers N]

Each at a share of the capacity that its first policy shows when the same requests come at once, as in the quickstart.
Results go to experiments/benchmarks/results/robustness.json, tables of docs/robustness.md are made from them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.robustness import TIE, Finding, Scores, Trial, findings, ranking
from experiments import provenance
from experiments.benchmarks.layout import table
from experiments.groundtruth.pool import Pool
from experiments.robustness import NOTHING, SIZES, STALENESS, Run, compare, measured_errors, predict, served, tried

RESULTS = Path(__file__).parent / "benchmarks" / "results" / "robustness.json"
AT_ONCE = "workload.rate=1e6"
DEMO = (
    "workload=azure_conv",
    "workload.duration=200",
    "model=qwen2.5-32b",
    "device=l20",
    "parallel=pp4",
    "kv.blocks=4000",
)
REPLICAS = ("workload=azure_conv", "workload.duration=200", "model=llama-3.1-8b", "device=l20", "parallel=dp4")


@dataclass(frozen=True, slots=True)
class Study:
    """Policies compared by `metric` on one load: `load` times the capacity of the first."""

    question: str
    policies: Sequence[str]
    metric: str
    overrides: Sequence[str]
    load: float
    staleness: Sequence[float] = ()


STUDIES: Mapping[str, Study] = {
    "batching": Study(
        "Which batching rule, on the quickstart's pipeline?",
        ["vllm_v1", "chunked_prefill policy.budget.tokens=256", "token_throttling"],
        "mean_e2el",
        DEMO,
        0.8,
    ),
    "order": Study(
        "Who is next, where requests queue on the quickstart's pipeline?",
        ["token_throttling", "token_throttling policy/order=sjf"],
        "mean_e2el",
        DEMO,
        1.1,
    ),
    "routing": Study(
        "Which replica of four?",
        [f"chunked_prefill policy/route={route}" for route in ("round_robin", "least_outstanding", "vllm_dp")],
        "p90_ttft",
        REPLICAS,
        0.8,
        STALENESS,
    ),
}


def main() -> None:
    """Run the studies named, else all; print and write what they say."""
    parser = argparse.ArgumentParser(prog="python -m experiments.conclusions", description="Record robustness.")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all by default")
    parser.add_argument("--workers", type=int, default=None, help="processes; one a core by default, 0: none")
    wanted = parser.parse_args()
    if unknown := [name for name in wanted.studies if name not in STUDIES]:
        parser.error(f"{unknown[0]} is no study: choose of {', '.join(STUDIES)}")
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["studies"] if RESULTS.exists() else {}
    with Pool(wanted.workers) as pool:
        for name in wanted.studies or STUDIES:
            kept[name] = carried_out(STUDIES[name], pool)
            errors = {metric: measured_errors(metric) for metric in ("tpot", "ttft")}
            measured = {metric: np.percentile(sizes, (50, 90)).round(4).tolist() for metric, sizes in errors.items()}
            record = provenance.facts() | {"measured": measured, "studies": {n: kept[n] for n in STUDIES if n in kept}}
            provenance.write(RESULTS, record)
            print(told(record, name), flush=True)


def carried_out(study: Study, pool: Pool, sizes: Sequence[float] = SIZES) -> dict[str, Any]:
    """The study, with the rate that it ran at and all scores, in seconds."""
    probe = served(Run(study.policies[0], NOTHING, study.metric, (*study.overrides, AT_ONCE)))
    rate = study.load * len(probe.ids) / probe.makespan
    given = [*study.overrides, f"workload.rate={rate:.4g}"]
    changes = [NOTHING, *tried(sizes, study.staleness, predict(study.policies, given))]
    baseline, trials = compare(study.policies, changes, study.metric, given, pool)
    return asdict(study) | {"rate": rate, "baseline": baseline, "trials": [asdict(trial) for trial in trials]}


def page(record: Mapping[str, Any]) -> str:
    """All studies that are recorded."""
    return "\n\n".join(f"### {study['question']}\n\n{told(record, name)}" for name, study in record["studies"].items())


def told(record: Mapping[str, Any], name: str) -> str:
    """What one study says: its scores, each kind of error, the conclusion."""
    study = record["studies"][name]
    baseline, trials = study["baseline"], [Trial(**trial) for trial in study["trials"]]
    winner, whole = findings(baseline, trials), findings(baseline, trials, whole=True)
    rows = [_row(one, all_of_them) for one, all_of_them in zip(winner, whole, strict=True)]
    head = ["error of", "best one holds up to", "broken by", "ranking holds up to", "regret at most"]
    return "\n\n".join(
        [_setting(study), _scores(study, baseline), table(head, rows), _conclusion(winner, whole, record, study)]
    )


def _setting(study: Mapping[str, Any]) -> str:
    return f"`{' '.join(study['overrides'])}`, {study['rate']:.2f} requests/s ({study['load']:.0%} of capacity)."


def _scores(study: Mapping[str, Any], baseline: Scores) -> str:
    rows = [[f"`{name}`", f"{baseline[name]:.3g}"] for name in ranking(baseline)]
    return table(["", f"{study['metric'].replace('_', ' ')}, s"], rows)


def _row(winner: Finding, whole: Finding) -> list[str]:
    return [
        winner.kind,
        _size(winner, winner.holds_up_to),
        winner.broken_by or "nothing tried",
        _size(whole, whole.holds_up_to),
        f"{winner.regret:.1%}",
    ]


def _conclusion(
    winner: Sequence[Finding], whole: Sequence[Finding], record: Mapping[str, Any], study: Mapping[str, Any]
) -> str:
    baseline, (middle, ninth) = study["baseline"], record["measured"]["tpot"]
    best, *others = ranking(baseline)
    tied = "".join(f", tied with `{name}`" for name in others if baseline[name] <= baseline[best] * (1 + TIE))
    stale = next((one.holds_up_to for one in winner if one.kind == "load reports"), None)
    reports = "" if stale is None else f" and with load reports up to {stale:g} s old"
    held, order = _held(winner), _held(whole)
    return (
        f"The conclusion (`{best}` is best{tied}) holds up to "
        f"±{held:.0%}{reports}; those that differed keep their order up to ±{order:.0%}. Errors of TPOT as measured: "
        f"median {middle:.1%}, nine of ten below {ninth:.0%}. The conclusion bears {_against(held, middle, ninth)}, "
        f"the order {_against(order, middle, ninth)}."
    )


def _held(found: Sequence[Finding]) -> float:
    return min(one.holds_up_to for one in found if one.kind != "load reports")


def _against(held: float, middle: float, ninth: float) -> str:
    """What it bears, beside what was measured."""
    if held >= ninth:
        return "more than nine of ten"
    return "more than the median" if held >= middle else "less than the median"


def _size(found: Finding, size: float) -> str:
    return f"{size:g} s" if found.kind == "load reports" else f"±{size:.0%}"


if __name__ == "__main__":
    main()
