"""The parts of the engine's benchmark, and their command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from experiments.benchmarks.gpu.engine.batch import time_serve
from experiments.benchmarks.gpu.engine.beside import transformers
from experiments.benchmarks.gpu.engine.checks import check
from experiments.benchmarks.gpu.engine.flight import time_flight
from experiments.benchmarks.gpu.engine.products import time_gemm
from experiments.benchmarks.gpu.engine.profiling import profile
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.steps import time_decode, time_mixed, time_prefill
from experiments.benchmarks.gpu.engine.subject import Subject
from experiments.benchmarks.gpu.engine.swap import time_swap
from experiments.benchmarks.gpu.facts import facts
from experiments.benchmarks.gpu.parts import some_of

MODEL = "qwen3-8b"

PARTS: dict[str, Callable[[Report, Subject], None]] = {
    "check": lambda report, subject: check(report),
    "decode": time_decode,
    "prefill": time_prefill,
    "serve": time_serve,
    "mixed": time_mixed,
    "swap": time_swap,
    "profile": profile,
    "gemm": time_gemm,
    "transformers": transformers,
    "flight": time_flight,
}
USUAL = [name for name in PARTS if name not in ("transformers", "flight")]
"""The others take minutes."""


def main(method: str) -> int:
    """`method`: how it is measured, for the help and the record."""
    options = _parser(method).parse_args()
    report = Report(options.out, options.budget, method)
    report.facts |= facts(options.commit)
    subject = Subject(MODEL, report.facts)
    for name in options.only:
        report.attempt(name, partial(PARTS[name], report, subject))
    report.show()
    report.write()
    return 1 if report.failures or not all(check["good"] for check in report.checks) else 0


def _parser(method: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=method, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu_engine.json")
    parser.add_argument("--only", type=some_of(PARTS), default=USUAL, help=", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=360.0, help="seconds after which no other part begins")
    parser.add_argument("--commit", default="", help="of this tree, where it lies without its history")
    return parser
