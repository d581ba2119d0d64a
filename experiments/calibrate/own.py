"""The second half of `make demo`: this machine is calibrated, and the simulator held against it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from analysis.fidelity import layers
from analysis.fidelity.study import Pair, read
from experiments import report
from experiments.calibrate.conclude import table, unsteady
from experiments.calibrate.study import Calibrate
from experiments.fidelity.twin import pair
from experiments.settings import SettingError
from experiments.study import Composer

ALL_AT_ONCE = 1e6
"""Requests per second that leave no gaps."""
AGAIN = "-again"
STEADY = 0.25
"""Share that repetitions of a run may be apart."""
LABELS = {
    "throughput": ("req/s", 1.0),
    "ttft_p50": ("TTFT P50 (ms)", 1e3),
    "ttft_p90": ("TTFT P90 (ms)", 1e3),
    "tpot_p50": ("TPOT P50 (ms)", 1e3),
    "tpot_p90": ("TPOT P90 (ms)", 1e3),
    "e2el_p50": ("E2E P50 (ms)", 1e3),
    "e2el_p90": ("E2E P90 (ms)", 1e3),
}


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """Calibrates `engine`, then has each of `policies` serve `workload` on it twice, and once in simulation.

    The load is `load` times the throughput that the simulator, calibrated so, foresees for the first policy when all
    requests come at once: any machine is as busy as any other. Nothing is fitted to these runs.
    """

    engine: Sequence[str]
    workload: Sequence[str]
    policies: Sequence[str]
    calibration: Calibrate
    load: float = 0.6

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingError("study.policies=[] must name at least one policy")
        if self.load <= 0:
            raise SettingError(f"study.load={self.load} must be more than 0 (1 is the capacity)")

    def run(self, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
        composer = Composer(folder, [*self.engine, *overrides])
        print(f"1. Timing steps of the engine on this machine: {' '.join(self.engine)}")
        profile, file = self.calibration.calibrated(folder / "calibration", composer)
        report.console().print(table(profile))
        if warning := unsteady(profile):
            print(warning)
        cost = ["backend/cost=calibrated", f"backend.cost.path={file}"]
        rate = self.load * self._capacity(composer, cost)
        print(f"\n2. Serving at {rate:.3g} requests/s, {self.load:.0%} of the simulated capacity, each policy twice")
        for name, policy in self._runs():
            setting = [*self.workload, f"workload.rate={rate:.4g}", f"policy={policy}"]
            composer.run(f"hardware/{name}", name, *setting)
        print("\n3. The same in simulation, which knows the profile only")
        for name, _ in self._runs():
            pair(folder / "hardware" / name, folder, cost, name)
        pairs = {one.name: one for one in read(folder)}
        report.console().print(self._table(pairs))
        print("\n".join(self._told(pairs, file)))
        return {"run_dir": str(folder), "profile": str(file), "rate": rate} | self._figures(pairs)

    def _runs(self) -> list[tuple[str, str]]:
        """(folder's name, policy), in an order in which what drifts meets all policies alike."""
        return [(f"{policy}{suffix}", policy) for suffix in ("", AGAIN) for policy in self.policies]

    def _capacity(self, composer: Composer, cost: Sequence[str]) -> float:
        simulated = ["backend=sim", *cost, f"policy={self.policies[0]}"]
        # The engine's options are the composer's: those of the backend would be taken for the simulator's.
        alone = Composer(composer.folder, [one for one in composer.overrides if not _of_the_backend(one)])
        rate = [f"workload.rate={ALL_AT_ONCE:g}"]
        return float(alone.run("capacity", "capacity", *self.workload, *simulated, *rate)["request_throughput"])

    def _table(self, pairs: dict[str, Pair]) -> Table:
        shown = Table(title="Engine beside simulation", title_justify="left", box=SIMPLE_HEAD)
        for name in ("policy", "metric", "engine", "again", "simulated", "error", "engine's spread"):
            shown.add_column(name, justify="left" if name in ("policy", "metric") else "right")
        for policy in self.policies:
            for metric, row in _compared(pairs[policy], pairs[policy + AGAIN]).items():
                name, factor = LABELS[metric]
                figures = [_number(row[key] * factor) for key in ("engine", "again", "simulated")]
                shown.add_row(policy, name, *figures, f"{row['error']:+.1%}", f"{row['spread']:.1%}")
            shown.add_section()
        return shown

    def _told(self, pairs: dict[str, Pair], file: Path) -> list[str]:
        rows = layers.decision([*pairs.values()])
        same, replayed = sum(row["identical"] for row in rows), sum(row["steps"] for row in rows)
        steps = [row for row in layers.kernel([*pairs.values()]) if row["kind"] == "all"]
        median, total = mean(row["median"] for row in steps), mean(row["total"] for row in steps)
        simulated = " ".join(one for one in self.engine if not _of_the_backend(one))
        return [
            "Errors are those of the simulation against the mean of the engine's two runs, which are so far apart.",
            f"Decisions, replayed with the engine's step times: identical in {same} of {len(rows)} runs, {replayed:,} "
            "steps.",
            f"Single steps are {median:.0%} off on the median; all steps of a run together {total:+.0%}.",
            *self._unsteady(pairs),
            f"Profile: {file} (docs/calibration.md says what it holds). Simulate with it, in seconds and at any load:",
            f"  playground backend/cost=calibrated {simulated} workload.rate=20",
        ]

    def _unsteady(self, pairs: dict[str, Pair]) -> list[str]:
        """Whether the engine's own runs tell anything."""
        spreads = [row["spread"] for figures in self._figures(pairs).values() for row in figures.values()]
        if max(spreads) <= STEADY:
            return []
        return [
            f"The engine's own two runs are up to {max(spreads):.0%} apart: something else used this machine, and no "
            "smaller error means anything. Close other programs and try again: playground +experiment=own_machine"
        ]

    def _figures(self, pairs: dict[str, Pair]) -> dict[str, Any]:
        return {policy: _compared(pairs[policy], pairs[policy + AGAIN]) for policy in self.policies}


def _compared(first: Pair, again: Pair) -> dict[str, dict[str, float]]:
    """By metric, in requests per second and seconds; the simulation of the first run, whose twin is the same."""
    found = {}
    repeated = layers.figures(again)
    for metric, (engine, simulated) in layers.figures(first).items():
        other = repeated[metric][0]
        middle = (engine + other) / 2
        found[metric] = {
            "engine": engine,
            "again": other,
            "simulated": simulated,
            "error": simulated / middle - 1,
            "spread": abs(engine - other) / middle,
        }
    return found


def _of_the_backend(override: str) -> bool:
    return override.lstrip("+").startswith("backend")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
