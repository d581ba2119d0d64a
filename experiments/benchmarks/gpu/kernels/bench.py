"""Checks and timings that go to one report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.gpu.ceilings import COPY, MATMUL
from experiments.benchmarks.gpu.kernels.report import Report
from kernels.triton.timing import microseconds

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative Frobenius error."""


def error(out: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error in double precision; NaN anywhere is NaN."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


class Bench:
    """Checks and timings that go to one report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def check(
        self,
        name: str,
        dtype: torch.dtype,
        work: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        bound: float | None = None,
    ) -> None:
        """`work` yields (output, float32 reference)."""
        most = BOUNDS[dtype] if bound is None else bound

        def run() -> None:
            worst = max((error(out, wanted) for out, wanted in work()), key=lambda e: math.inf if math.isnan(e) else e)
            good = worst < most
            self.report.checks.append({"name": name, "dtype": _short(dtype), "error": worst, "good": good})
            if not good:
                print(f"WRONG {name} {_short(dtype)}: error {worst:.2e}, bound {most:.0e}", flush=True)

        self.report.attempt(f"check {name} {_short(dtype)}", run)

    def time(
        self,
        name: str,
        case: str,
        calls: Callable[[], Sequence[Callable[[], Any]]],
        *,
        moved: float = 0.0,
        flops: float = 0.0,
        ceiling: float = MATMUL,
    ) -> None:
        """`moved` bytes or `flops` operations a call, the ceiling in operations a second."""

        def run() -> None:
            span = microseconds(calls())
            row: dict[str, Any] = {"name": name, "case": case, "us": span}
            if flops:
                row |= {"tflops": flops / span / 1e6, "ceiling": ceiling / 1e12, "share": flops / span * 1e6 / ceiling}
            elif moved:
                row |= {"gbs": moved / span / 1e3, "ceiling": COPY / 1e9, "share": moved / span * 1e6 / COPY}
            self.report.timings.append(row)

        self.report.attempt(f"time {name} {case}", run)
        torch.cuda.empty_cache()


class Rehearsal(Bench):
    """Compiles what checks will launch and checks nothing."""

    def check(self, name: str, dtype: torch.dtype, work: Any, bound: float | None = None) -> None:
        # What was not launched computes nothing: a check's own assertions may well fail.
        with suppress(Exception):
            for _ in work():
                pass


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
