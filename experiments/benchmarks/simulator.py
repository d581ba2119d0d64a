"""How fast the simulator is: requests and steps per CPU-second, trace written as in any run.

    python -m experiments.benchmarks.simulator [CASE ...] [--million]

CPU time of one process on one core, a fresh process for each round. Start-up is all until the first request (Python,
imports, configuration, workload); serving is from there to the closed trace. Steps count every repetition of a merged
step. Memory is the most that the process ever held. Results go to `results/simulator.json`.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from time import process_time

import pyarrow.parquet as pq
from hydra import compose, initialize_config_module

from experiments import launcher, plugins, provenance, settings
from experiments.build import Parts, build
from playground.loop import serve
from playground.trace import Trace

RESULTS = Path(__file__).parent / "results" / "simulator.json"

ROUNDS, LONG = 3, 15.0
"""Of each case the median; one round where that takes so many seconds."""
SHARED = ("workload=normal", "device=h200")
"""The load that peers' figures are of: Poisson, prompts and outputs about N(512, 256), chunked prefill of 2048."""
CASES: Mapping[str, Sequence[str]] = {
    "Shared load, 4 requests/s": [*SHARED],
    "Shared load, 40 requests/s: 256 sequences run, the rest waits": [*SHARED, "workload.rate=40"],
    "Shared load, 40 requests/s, 8,000 KV blocks: preempting": [*SHARED, "workload.rate=40", "kv.blocks=8000"],
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
    "Four replicas, 16 requests/s": [*SHARED, "parallel=dp4", "workload.rate=16"],
    "64 replicas, 256 requests/s": [*SHARED, "parallel=dp4", "parallel.replicas=64", "workload.rate=256"],
    "32B in four stages, 2 requests/s": [*SHARED, "model=qwen2.5-32b", "parallel=pp4", "workload.rate=2"],
    "Growth: 1,000 requests": [*SHARED, "workload.requests=1000"],
    "Growth: 10,000 requests": [*SHARED, "workload.requests=10000"],
    "Growth: 100,000 requests": [*SHARED, "workload.requests=100000"],
}
MILLION: Mapping[str, Sequence[str]] = {"Growth: 1,000,000 requests": [*SHARED, "workload.requests=1000000"]}


@dataclass(frozen=True, slots=True)
class Row:
    """One case: the median round. Seconds are CPU seconds; `rows` of the trace stand for `steps`."""

    case: str
    overrides: tuple[str, ...]
    requests: int
    steps: int
    rows: int
    start_up: float
    serving: float
    requests_per_second: float
    steps_per_second: float
    memory_mib: float


def main() -> None:
    """Measure the cases named on the command line, else all; print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", help=f"beginnings of: {'; '.join(CASES)}")
    parser.add_argument("--million", action="store_true", help="a million requests, too: about ten minutes")
    given = parser.parse_args()
    wanted = {case: how for case, how in CASES.items() if not given.cases or case.startswith(tuple(given.cases))}
    rows = []
    for case, overrides in (wanted | (dict(MILLION) if given.million else {})).items():
        rows.append(_median(case, overrides))
        print(_told(rows[-1]), flush=True)
    provenance.write(RESULTS, provenance.facts() | _method() | {"rows": [asdict(row) for row in rows]})


def _method() -> dict[str, object]:
    return {"method": __doc__, "rounds": ROUNDS, "one_round_from_seconds": LONG, "cpus": os.cpu_count()}


def _told(row: Row) -> str:
    return (
        f"{row.case}: {row.requests:,} requests, {row.steps:,} steps in {row.serving:.1f} CPU-s: "
        f"{row.requests_per_second:,.0f} requests/s, {row.steps_per_second:,.0f} steps/s, "
        f"start-up {row.start_up:.1f} s, {row.memory_mib:,.0f} MiB"
    )


def _apart(case: str, overrides: Sequence[str]) -> Row:
    """In a process of its own: start-up and memory are no other round's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, case, overrides).result()


def _measure(case: str, overrides: Sequence[str]) -> Row:
    parts = _build(overrides)
    ready = process_time()
    with tempfile.TemporaryDirectory() as folder:
        with Trace(folder) as trace:
            serve(parts.source, parts.scheduler, parts.backend, trace)
        served = process_time() - ready
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        requests = pq.read_metadata(f"{folder}/requests.parquet").num_rows
        counts = pq.read_table(f"{folder}/steps.parquet", columns=["count"])["count"].to_numpy()
    steps = int(counts.sum())
    rates = requests / served, steps / served
    return Row(case, tuple(overrides), requests, steps, len(counts), ready, served, *rates, memory)


def _build(overrides: Sequence[str]) -> Parts:
    for registering in (settings, plugins, launcher):
        registering.register()
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides=[_open(override) for override in [*overrides, "run_dir=unused"]])
    return build(settings.read(config))


def _open(override: str) -> str:
    """Options that their YAML does not list may be set all the same."""
    return f"++{override}" if "." in override.partition("=")[0] else override


def _median(case: str, overrides: Sequence[str]) -> Row:
    rows = [_apart(case, overrides)]
    while len(rows) < ROUNDS and rows[0].serving < LONG:
        rows.append(_apart(case, overrides))
    return sorted(rows, key=lambda row: row.serving)[len(rows) // 2]


if __name__ == "__main__":
    main()
