"""How fast the simulator is: requests and steps per CPU-second, trace written as in any run.

    python -m experiments.benchmarks.simulator [CASE ...]

CPU time of one process, on one core, from the first request to the closed trace; start-up (imports, reading the
workload) is told apart. Steps count every repetition of a merged step. Results go to `results/simulator.json`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

import pyarrow.compute as pc
from hydra import compose, initialize_config_module

from experiments import plugins, provenance, settings
from experiments.build import Parts, build
from playground.loop import serve
from playground.trace import Trace, read

RESULTS = Path(__file__).parent / "results" / "simulator.json"

ROUNDS = 3
CASES: Mapping[str, Sequence[str]] = {
    "Azure conversation hour, 8B on one H200": ["workload=azure_conv", "device=h200"],
    "Azure conversation hour, every step by itself": [
        "workload=azure_conv",
        "device=h200",
        "backend.skip_ahead=false",
    ],
    "Azure conversation hour, 32B on 4 L20 (pipeline), half the rate": [
        "workload=azure_conv",
        "workload.speedup=0.5",
        "model=qwen2.5-32b",
        "device=l20",
        "parallel=pp4",
    ],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One case: the median round. Seconds are CPU seconds."""

    case: str
    overrides: tuple[str, ...]
    requests: int
    steps: int
    start_up: float
    serving: float
    requests_per_second: float
    steps_per_second: float


def main() -> None:
    """Measure the cases named on the command line, else all; print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", help=f"beginnings of: {'; '.join(CASES)}")
    wanted = parser.parse_args().cases
    settings.register()
    plugins.register()
    rows = [
        _median([_measure(case, overrides) for _ in range(ROUNDS)])
        for case, overrides in CASES.items()
        if not wanted or any(case.startswith(name) for name in wanted)
    ]
    for row in rows:
        print(
            f"{row.case}: {row.requests:,} requests, {row.steps:,} steps in {row.serving:.1f} CPU-s: "
            f"{row.requests_per_second:,.0f} requests/s, {row.steps_per_second:,.0f} steps/s, "
            f"start-up {row.start_up:.1f} s"
        )
    provenance.write(RESULTS, provenance.facts() | _method() | {"rows": [asdict(row) for row in rows]})


def _method() -> dict[str, object]:
    return {"method": __doc__, "rounds": ROUNDS, "cpus": os.cpu_count()}


def _measure(case: str, overrides: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        began = process_time()
        parts = _build(overrides)
        ready = process_time()
        with Trace(folder) as trace:
            serve(parts.source, parts.scheduler, parts.backend, trace)
        served = process_time() - ready
        requests, steps = read(folder, "requests", ["id"]).num_rows, _steps(folder)
    rates = requests / served, steps / served
    return Row(case, tuple(overrides), requests, steps, ready - began, served, *rates)


def _build(overrides: Sequence[str]) -> Parts:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=[_open(override) for override in [*overrides, "run_dir=unused"]])
    return build(settings.read(config))


def _open(override: str) -> str:
    """Options that their YAML does not list may be set all the same."""
    return f"++{override}" if "." in override.partition("=")[0] else override


def _steps(folder: str) -> int:
    return int(pc.sum(read(folder, "steps", ["count"])["count"]).as_py())


def _median(rows: list[Row]) -> Row:
    return sorted(rows, key=lambda row: row.serving)[len(rows) // 2]


if __name__ == "__main__":
    main()
