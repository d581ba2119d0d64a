"""The four layers: kernel (steps), decision, trajectory (latencies, throughput, time series), conclusion (rankings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from analysis.fidelity.study import Pair, Setting, settings
from analysis.metrics import Tables, percentile
from analysis.tokens import Array

LATENCIES = ("ttft", "tpot", "e2el")
P99_FROM = 1000
"""Requests that a P99 needs."""
LEAST_SPREAD = 0.01
"""Of repetitions, as a share: what two of them do not show may still be there."""
HIGHER_IS_BETTER = ("throughput",)

# --- kernel


def kernel(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Errors of single steps, by run and kind of step (`all` first); shares, signed where they are biases."""
    rows = []
    for pair in pairs:
        steps = pair.predicted
        for kind, part in [("all", steps), *steps.groupby("kind")]:
            rows.append({"name": pair.name, "kind": str(kind)} | step_errors(part))
    return rows


def step_errors(steps: pd.DataFrame) -> dict[str, float]:
    off = steps["predicted"] / steps["measured"] - 1
    return {
        "steps": len(steps),
        "mape": float(off.abs().mean()),
        "median": float(off.abs().median()),
        "p95": float(off.abs().quantile(0.95)),
        "bias": float(off.mean()),
        "total": float(steps["predicted"].sum() / steps["measured"].sum() - 1),
    }


def host_gaps(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Seconds that the device waited for the host between steps, measured and predicted."""
    rows = []
    for pair in pairs:
        known = pair.predicted.dropna(subset=["gap_measured"])
        measured, predicted = float(known["gap_measured"].sum()), float(known["gap_predicted"].sum())
        steps = float(pair.predicted["measured"].sum())
        rows.append({"name": pair.name, "measured": measured, "predicted": predicted, "of_steps": measured / steps})
    return rows


# --- decision


def decision(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Replayed decisions, and how long the free-running simulation composed the same steps."""
    rows = []
    for pair in pairs:
        parity = pair.about["parity"]
        free, of = agreement(pair.hardware, pair.simulated)
        rows.append(
            {
                "name": pair.name,
                "identical": bool(parity["identical"]),
                "steps": int(parity["steps"]),
                "text": str(parity["text"]),
                "free_running": free,
                "of": of,
            }
        )
    return rows


def agreement(hardware: Tables, simulated: Tables) -> tuple[int, int]:
    """(steps before the first one that has other prefill or decode tokens, steps on hardware)"""
    real, made = (_compositions(tables) for tables in (hardware, simulated))
    both = min(len(real), len(made))
    differ = np.flatnonzero((real[:both] != made[:both]).any(axis=1))
    return (int(differ[0]) if len(differ) else both), len(real)


def _compositions(tables: Tables) -> Array:
    found: Array = tables.repetitions[["prefill_tokens", "decode_tokens"]].to_numpy()
    return found


# --- trajectory


def trajectory(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Of each run, metric by metric: hardware's figure, the simulation's, the error, and distances of distributions."""
    rows = []
    for pair in pairs:
        for metric, (real, made) in figures(pair).items():
            rows.append(
                {"name": pair.name, "metric": metric, "hardware": real, "simulated": made, "error": made / real - 1}
            )
    return rows


def figures(pair: Pair) -> dict[str, tuple[float, float]]:
    """(hardware, simulated) by metric: requests per second and seconds."""
    real, made = pair.latencies
    found = {"throughput": (_throughput(real), _throughput(made))}
    quantiles = (50, 90, 99) if min(len(real), len(made)) >= P99_FROM else (50, 90)
    for name in LATENCIES:
        for q in quantiles:
            values = tuple(percentile(side[name].dropna().to_numpy(), q) for side in (real, made))
            found[f"{name}_p{q}"] = values[0], values[1]
    return found


def _throughput(requests: pd.DataFrame) -> float:
    span = float(requests["finished"].max() - requests["arrival"].min())
    return len(requests) / span if span > 0 else float("nan")


def distances(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Between the distributions: Kolmogorov-Smirnov, and Wasserstein's as a share of the hardware's mean."""
    rows = []
    for pair in pairs:
        for name in LATENCIES:
            real, made = (np.sort(side[name].dropna().to_numpy()) for side in pair.latencies)
            rows.append(
                {
                    "name": pair.name,
                    "metric": name,
                    "ks": ks(real, made),
                    "wasserstein": wasserstein(real, made) / real.mean(),
                }
            )
    return rows


def ks(real: Array, made: Array) -> float:
    """The largest difference of two sorted samples' cumulative distributions."""
    at = np.concatenate([real, made])
    shares = [np.searchsorted(side, at, side="right") / len(side) for side in (real, made)]
    return float(np.abs(shares[0] - shares[1]).max())


def wasserstein(real: Array, made: Array) -> float:
    """The area between two sorted samples' cumulative distributions."""
    at = np.sort(np.concatenate([real, made]))
    shares = [np.searchsorted(side, at[:-1], side="right") / len(side) for side in (real, made)]
    return float((np.abs(shares[0] - shares[1]) * np.diff(at)).sum())


# --- the hardware's own spread


def spreads(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """By group: of each metric, how far its repetitions are apart as a share of their mean, and whose they are.

    A group that was not repeated has those of the nearest one that was: the same setting, else workload and pool, else
    any; of several the widest.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    known = {group: _spread(members) for group, members in groups.items() if len(members) > 1}
    found = {}
    for group, members in groups.items():
        nearest = [group] if group in known else _nearest(members[0], known, groups)
        widest: dict[str, float] = {}
        for name in nearest:
            for metric, value in known[name].items():
                widest[metric] = max(value, widest.get(metric, 0.0))
        found[group] = {"of": nearest, "spread": widest}
    return found


def _spread(members: Sequence[Pair]) -> dict[str, float]:
    values = [figures(pair) for pair in members]
    common = set.intersection(*(set(value) for value in values))
    real = {metric: np.asarray([value[metric][0] for value in values]) for metric in sorted(common)}
    return {metric: float((side.max() - side.min()) / side.mean()) for metric, side in real.items()}


def _nearest(pair: Pair, known: Mapping[str, Any], groups: Mapping[str, Sequence[Pair]]) -> list[str]:
    def near(group: str) -> int:
        workload, load, pool = groups[group][0].setting
        mine = pair.setting
        return ((workload, load, pool) == mine) * 2 + ((workload, pool) == (mine[0], mine[2]))

    best = max((near(group) for group in known), default=0)
    return [group for group in known if near(group) == best]


def spread_of(found: Mapping[str, Mapping[str, Any]], group: str, metric: str) -> float:
    """Never below `LEAST_SPREAD`."""
    return max(float(found[group]["spread"].get(metric, 0.0)), LEAST_SPREAD)


# --- conclusion


def conclusion(pairs: Sequence[Pair], spread: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each setting with several policies and each metric: do both rank them alike, and what is lost if not?"""
    rows = []
    for setting, members in settings(pairs).items():
        scores = _scores(members)
        if len(scores) > 1:
            common = set.intersection(*(set(score) for score in scores.values()))
            rows += [_ranking(setting, metric, scores, spread) for metric in sorted(common)]
    return rows


def _scores(members: Sequence[Pair]) -> dict[str, dict[str, tuple[float, float]]]:
    """(hardware, simulated) by group and metric, means of repetitions."""
    by_group: dict[str, list[dict[str, tuple[float, float]]]] = {}
    for pair in members:
        by_group.setdefault(pair.group, []).append(figures(pair))
    return {
        group: {metric: _mean([value[metric] for value in values]) for metric in values[0]}
        for group, values in by_group.items()
    }


def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    real, made = np.asarray(values).mean(axis=0)
    return float(real), float(made)


def _ranking(
    setting: Setting,
    metric: str,
    scores: Mapping[str, Mapping[str, tuple[float, float]]],
    spread: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0
    real = {group: sign * score[metric][0] for group, score in scores.items()}
    made = {group: sign * score[metric][1] for group, score in scores.items()}
    agree = separated = all_agree = 0
    wrong = []
    for a, b in combinations(scores, 2):
        same = (real[a] - real[b]) * (made[a] - made[b]) > 0
        all_agree += 1 if same else -1
        apart = abs(real[a] - real[b]) / ((abs(real[a]) + abs(real[b])) / 2)
        if apart > max(spread_of(spread, a, metric), spread_of(spread, b, metric)):
            separated += 1
            agree += same
            wrong += [] if same else [f"{a} / {b}"]
    chosen, best = min(made, key=lambda group: made[group]), min(real, key=lambda group: real[group])
    return {
        "setting": list(setting),
        "metric": metric,
        "policies": len(scores),
        "separated": separated,
        "agree": agree,
        "tau_separated": (2 * agree - separated) / separated if separated else None,
        "tau": all_agree / (len(scores) * (len(scores) - 1) / 2),
        "wrong": wrong,
        "chosen": chosen,
        "best": best,
        "regret": abs(real[chosen] - real[best]) / abs(real[best]),
    }
