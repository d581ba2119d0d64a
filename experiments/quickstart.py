"""The tour: policies compared where they differ, the same policies on a real model, and proof that both agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.metrics import Summary, load
from experiments import report
from experiments.parity import prove
from experiments.settings import SettingError
from experiments.study import Composer

ALL_AT_ONCE = 1e6
"""Requests per second that leave no gaps."""


@dataclass(frozen=True, slots=True)
class Quickstart:
    """`simulation`, `idle` and `engine` are overrides: what is simulated, where it does not matter, what is real;
    `tuned` is a baseline at its own best setting, which the winner must be held against.

    The simulated load is `load` times the throughput that the first policy reaches when the first `probe` of the
    same requests come at once: so many that their mixture is that of all.
    """

    policies: Sequence[str]
    simulation: Sequence[str]
    idle: Sequence[str]
    engine: Sequence[str]
    tuned: Sequence[str]
    load: float = 0.8
    probe: int = 1000

    def __post_init__(self) -> None:
        if not self.policies:
            raise SettingError("study.policies=[] must name at least one policy")
        if self.load <= 0:
            raise SettingError(f"study.load={self.load} must be more than 0 (1 is the measured capacity)")

    def run(self, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
        composer = Composer(folder, overrides)
        rate = self.load * self._capacity(composer)
        setting = [*self.simulation, f"workload.rate={rate:.4g}"]
        simulated = self._compare(composer, "sim", setting)
        _show(simulated, f"Simulated: {' '.join(self.simulation)}, {rate:.2f} req/s")
        print(_sustained(simulated, rate))
        print(_differences(simulated))
        print(self._held_against_the_tuned(composer, setting, simulated))
        print(self._where_it_does_not_matter(composer))
        real = self._compare(composer, "engine", self.engine)
        _show(real, f"Real: {' '.join(self.engine)}")
        for policy in self.policies:
            print(f"Parity, {policy}: {prove(folder / 'engine' / policy)}")
        self._plot(folder)
        print(f"Traces, summaries and plots: {folder}/{{sim,engine}}/*")
        return {"run_dir": str(folder), "rate": rate, "sim": simulated, "engine": real}

    def _capacity(self, composer: Composer) -> float:
        policy = self.policies[0]
        probe = [f"workload.rate={ALL_AT_ONCE:g}", f"workload.requests={self.probe}"]
        summary = composer.run("capacity", "capacity", *self.simulation, f"policy={policy}", *probe)
        capacity = float(summary["request_throughput"])
        told = f"{self.probe:,} requests at once: {capacity:.2f} req/s; load {self.load:.0%} of it"
        print(f"Capacity under {policy}, {told}")
        return capacity

    def _compare(self, composer: Composer, part: str, setting: Sequence[str]) -> dict[str, Summary]:
        return {
            policy: composer.run(f"{part}/{policy}", f"{part}: {policy}", *setting, f"policy={policy}")
            for policy in self.policies
        }

    def _held_against_the_tuned(self, composer: Composer, setting: Sequence[str], simulated: dict[str, Summary]) -> str:
        tuned = composer.run("tuned", "sim: tuned", *setting, *self.tuned)
        best = _soonest(simulated)
        times = float(tuned["mean_e2el_ms"]) / float(simulated[best]["mean_e2el_ms"])
        return (
            f"Held against a tuned baseline, {' '.join(self.tuned)}: {times:.2f} times the mean latency of {best}. "
            "Sweep a baseline's knobs before you claim a gain."
        )

    def _where_it_does_not_matter(self, composer: Composer) -> str:
        idle = self._compare(composer, "idle", self.idle)
        spread = _spread(idle, "mean_e2el_ms")
        return (
            f"Where it would not matter: {' '.join(self.idle)}; there the slowest takes {spread - 1:.1%} longer only."
        )

    def _plot(self, folder: Path) -> None:
        try:
            from analysis.plots import save_all
        except ImportError:
            print("No plots: pip install -e '.[report]'")
            return
        for part in ("sim", "engine"):
            save_all({policy: load(folder / part / policy) for policy in self.policies}, folder / part / "plots")


def _show(summaries: dict[str, Summary], title: str) -> None:
    rows = [({"policy": policy}, summary) for policy, summary in summaries.items()]
    print(f"\n{title}")
    report.console().print(report.comparison(rows))


def _differences(summaries: dict[str, Summary]) -> str:
    spread = _spread(summaries, "mean_e2el_ms")
    soonest = _soonest(summaries)
    return f"{soonest} answers soonest; with the slowest an answer takes {spread:.1f} times as long on average."


def _sustained(summaries: dict[str, Summary], rate: float) -> str:
    """Who keeps up: where a queue grows for as long as the trace lasts, latencies tell its length and little else."""
    behind = [name for name, summary in summaries.items() if float(summary["request_throughput"]) < 0.95 * rate]
    if not behind:
        return "All of them keep up with the arrivals."
    return f"Overloaded, so that latencies grow with the length of the trace: {', '.join(behind)}."


def _soonest(summaries: dict[str, Summary]) -> str:
    return min(summaries, key=lambda policy: float(summaries[policy]["mean_e2el_ms"]))


def _spread(summaries: dict[str, Summary], metric: str) -> float:
    """How many times the smallest the largest is."""
    values = [float(summary[metric]) for summary in summaries.values()]
    return max(values) / min(values)
