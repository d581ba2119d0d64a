"""The stages of the kernels' benchmark, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.gpu.facts import facts
from experiments.benchmarks.gpu.kernels.attention import attention
from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.checks import checks
from experiments.benchmarks.gpu.kernels.report import Report, table_of
from experiments.benchmarks.gpu.kernels.small import linear, sample, small
from experiments.benchmarks.gpu.kernels.steps import steps
from experiments.benchmarks.gpu.kernels.tune import tune
from kernels.autotune import Store

STAGES: Mapping[str, Callable[[Bench, Store], None]] = {
    "checks": checks, "tune": tune, "steps": steps, "attention": attention, "linear": linear, "small": small,
    "sample": sample,
}  # fmt: skip


def run_stage(name: str, out: Path) -> None:
    """In a process of its own: what it finds is written even if it is cut short."""
    report = Report(path=out / f"stage-{name}.json")
    store = Store(torch.cuda.get_device_properties(0).name, folder=out)
    report.attempt(f"stage {name}", partial(STAGES[name], Bench(report), store))


def run_all(stages: Sequence[str], out: Path, limit: float, versions: Mapping[str, Any]) -> Report:
    report, started = Report(), time.perf_counter()
    for name in stages:
        spent = time.perf_counter() - started
        if spent > limit - 15:
            report.failures.append({"name": name, "error": "no time left", "at": "run_all"})
            continue
        print(f"[{spent:5.0f} s] {name}", flush=True)
        command = [sys.executable, sys.argv[0], "--out", str(out), "--stage", name]
        found = out / f"stage-{name}.json"
        found.unlink(missing_ok=True)
        try:
            code = subprocess.run(command, check=False, timeout=limit - spent).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if found.is_file():
            report.absorb(json.loads(found.read_text()))
        if code:
            why = "cut short by the limit" if code == -1 else f"ended with code {code}"
            report.failures.append({"name": f"stage {name}", "error": why, "at": "run_all"})
        result = {"versions": versions, **report.found()}
        (out / "gpu_kernels.json").write_text(json.dumps(result, indent=1, default=str))
    print(f"[{time.perf_counter() - started:5.0f} s] done")
    return report


def main(method: str) -> None:
    """`method`: how it is measured, for the help and the record."""
    parser = argparse.ArgumentParser(description=method, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_kernels.json and tuned configs")
    parser.add_argument("--only", "--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--budget", "--limit", type=float, default=290.0, help="seconds after which no stage goes on")
    parser.add_argument("--commit", default="", help="of this tree, where it lies without its history")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages = options.only.split(",")
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"--only: no {unknown[0]}; there are {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage:
        run_stage(options.stage, options.out)
        return
    versions = facts(options.commit) | {"method": " ".join(method.split("Method: ")[1].split())}
    print(table_of(run_all(stages, options.out, options.budget, versions)))
