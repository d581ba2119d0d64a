"""What was aimed at, and whether it was reached: on steps, latencies, throughput, decisions and conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.fidelity.layers import spread_of
from analysis.fidelity.study import Pair

STEP_MAPE = 0.04
LATENCY, LATENCY_PAST = 0.05, 0.10
"""Of P50 and P90, below saturation and past it; or twice the hardware's own spread, where that is more."""
THROUGHPUT = 0.02
REACHED, MISSED, UNTESTABLE = "reached", "missed", "not testable"


def verdicts(
    pairs: Sequence[Pair],
    layers: Mapping[str, Sequence[Mapping[str, Any]]],
    spread: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row a target: what, the figure, the verdict, and who misses it."""
    return [
        _steps(pairs, layers["kernel"]),
        _decisions(layers["decision"]),
        _throughput(pairs, layers["trajectory"]),
        *[_latency(pairs, layers["trajectory"], spread, name) for name in ("ttft", "tpot", "e2el")],
        _conclusions(layers["conclusion"]),
    ]


def _row(target: str, figure: str, missing: Sequence[str], tested: int) -> dict[str, Any]:
    verdict = UNTESTABLE if not tested else MISSED if missing else REACHED
    return {"target": target, "figure": figure, "verdict": verdict, "tested": tested, "missed_by": list(missing)}


def _fitted(pair: Pair) -> bool:
    """Whether the cost model was fitted to runs of this workload: such a pair judges nothing."""
    return any(pair.setting[0] in str(run) for run in pair.about.get("fitted_to", ()))


def _steps(pairs: Sequence[Pair], kernel: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = {pair.name for pair in pairs if not _fitted(pair)}
    errors = {row["name"]: row["mape"] for row in kernel if row["kind"] == "all" and row["name"] in judged}
    missing = [f"{name} ({error:.1%})" for name, error in errors.items() if error > STEP_MAPE]
    figure = (
        f"{sum(errors.values()) / len(errors):.1%} on average, {max(errors.values()):.1%} at most" if errors else "-"
    )
    return _row(f"step time: MAPE of every run at most {STEP_MAPE:.0%}", figure, missing, len(errors))


def _decisions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    missing = [row["name"] for row in rows if not row["identical"]]
    steps = sum(row["steps"] for row in rows)
    figure = f"{len(rows) - len(missing)} of {len(rows)} runs, {steps:,} steps"
    return _row("decisions identical under replayed instants and step times", figure, missing, len(rows))


def _throughput(pairs: Sequence[Pair], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judged = {pair.name for pair in pairs if not _fitted(pair)}
    errors = {row["name"]: row["error"] for row in rows if row["metric"] == "throughput" and row["name"] in judged}
    missing = [f"{name} ({error:+.1%})" for name, error in errors.items() if abs(error) > THROUGHPUT]
    figure = f"{max(map(abs, errors.values())):.1%} at most" if errors else "-"
    return _row(f"throughput within {THROUGHPUT:.0%}", figure, missing, len(errors))


def _latency(
    pairs: Sequence[Pair],
    rows: Sequence[Mapping[str, Any]],
    spread: Mapping[str, Mapping[str, Any]],
    name: str,
) -> dict[str, Any]:
    by_name = {pair.name: pair for pair in pairs if not _fitted(pair)}
    chosen = [row for row in rows if row["metric"] in (f"{name}_p50", f"{name}_p90") and row["name"] in by_name]
    missing = []
    for row in chosen:
        limit = allowed(by_name[row["name"]], row["metric"], spread)
        if abs(row["error"]) > limit:
            missing.append(f"{row['name']} {row['metric'][-3:].upper()} ({row['error']:+.1%} of {limit:.1%})")
    sizes = sorted(abs(row["error"]) for row in chosen)
    figure = (
        f"median {sizes[len(sizes) // 2]:.1%}, {len(chosen) - len(missing)} of {len(chosen)} within" if chosen else "-"
    )
    target = f"{name.upper()} at P50 and P90 within 5 % (10 % past saturation) or twice the repeat spread"
    return _row(target, figure, missing, len(chosen))


def allowed(pair: Pair, metric: str, spread: Mapping[str, Mapping[str, Any]]) -> float:
    """By how much the simulation may be off."""
    least = LATENCY_PAST if pair.setting[1] == "past" else LATENCY
    return max(least, 2 * spread_of(spread, pair.group, metric))


def _conclusions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    separated, agree = sum(row["separated"] for row in rows), sum(row["agree"] for row in rows)
    missing = [f"{row['metric']}: {pair}" for row in rows for pair in row["wrong"]]
    worst = max((row["regret"] for row in rows), default=0.0)
    figure = f"{agree} of {separated} pairs, regret {worst:.1%} at most"
    return _row("pairs of policies that the hardware separates are ordered alike", figure, missing, separated)
