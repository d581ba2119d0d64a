"""The shapes of a published comparison."""

from __future__ import annotations

import math
import statistics

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import alike, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject


def time_flight(report: Report, subject: Subject) -> None:
    """The shapes of a published comparison: vLLM, Llama-3.1-8B in FP8 on an H200."""
    for count, prompt, output, theirs in ((112, 1000, 100, 11.25), (96, 4000, 500, 17.1)):
        run = served(subject.backend, alike(count, prompt, output, seed=count), policy(2048, 2))
        limit = subject.limit(count, prompt + output / 2)
        steps = run.decodes(count)
        report.row(
            f"TPOT {count} x ({prompt} + {output}), all at once", statistics.mean(run.tpot()) * 1e3, "ms", limit * 1e3,
            vllm_fp8_ms=theirs, preemptions=run.preemptions, duration_s=run.duration,
            full_step_ms=statistics.median(d.finished - d.started for _, d in steps) * 1e3 if steps else math.nan,
            median_tpot_ms=statistics.median(run.tpot()) * 1e3,
        )  # fmt: skip
