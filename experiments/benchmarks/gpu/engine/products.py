"""cuBLAS."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from experiments.benchmarks.gpu.ceilings import COPY
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.subject import Subject


def time_gemm(report: Report, subject: Subject) -> None:
    """Every projection of a decode step, alone in a graph that goes round the layers' weights."""
    shape = subject.model.shape
    sizes = {
        "qkv": (shape.query_width + 2 * shape.kv_width, shape.hidden), "out": (shape.hidden, shape.query_width),
        "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocabulary, shape.hidden),
    }  # fmt: skip
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for name, (outputs, inputs) in sizes.items():
            copies = max(2, min(12, math.ceil(3e8 / (outputs * inputs * 2))))
            weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(copies)]
            found = {}
            for rows in (1, 4, 8, 16, 32, 64, 128, 256):
                x = torch.randn(rows, inputs, device="cuda").bfloat16()
                span = _graph_seconds([partial(F.linear, x, weight) for weight in weights])
                found[f"m{rows}"] = outputs * inputs * 2 / span / COPY
            report.row(f"{library} {name} {outputs}x{inputs}, share of copy rate", found["m1"], "of 1", **found)
            del weights
    torch.backends.cuda.preferred_blas_library("cublas")


def _graph_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds of one call in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    spans = []
    for _ in range(5):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(4):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        spans.append(begun.elapsed_time(ended) / 1e3 / 4 / len(calls))
    return statistics.median(spans)
