"""Times of decode steps, of prompts, and of steps that mix them."""

from __future__ import annotations

import statistics
from itertools import pairwise

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import alike, idle_share, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject


def time_decode(report: Report, subject: Subject) -> None:
    for rows, context, target in ((1, 512, 4.5), (32, 1024, 6.0), (128, 1024, 10.5), (256, 1024, 0.0)):
        for ahead in (2, 1):
            steps = 64
            requests = alike(rows, context - steps // 2, steps, seed=rows + ahead)
            run = served(subject.backend, requests, policy(8192, ahead))
            found = [done for _, done in run.decodes(rows)]
            between = statistics.median(later.finished - earlier.finished for earlier, later in pairwise(found))
            device = statistics.median(done.finished - done.started for done in found)
            limit = subject.limit(rows, context)
            wanted = target if ahead > 1 else 0.0
            report.row(
                f"decode {rows} x {context}, run_ahead {ahead}", between * 1e3, "ms", limit * 1e3, wanted,
                device_ms=device * 1e3, idle_share=idle_share(found), of_limit=limit / between, steps=len(found),
            )  # fmt: skip


def time_prefill(report: Report, subject: Subject) -> None:
    spans = []
    for turn in range(3):
        run = served(subject.backend, alike(8, 2048, 1, seed=turn + 1), policy(16384, 1))
        spans.append(run.duration)
        (step, done), *rest = run.recorder.done
        assert not rest and sum(part.length for part in step.slices) == 8 * 2048
    limit = subject.prefill_limit(8, 2048)
    report.row(
        "prefill 8 x 2048", statistics.median(spans), "s", limit, 0.45, of_limit=limit / statistics.median(spans),
        device_s=done.finished - done.started, host_ms=done.host * 1e3, first_s=spans[0],
    )  # fmt: skip
    for chunk in (512, 1024, 2048, 4096):
        run = served(subject.backend, alike(4, 4096, 1, seed=10 + chunk), policy(chunk, 2))
        spans = [done.finished - done.started for step, done in run.recorder.done[1:]]
        limit = subject.prefill_limit(4, 4096)
        report.row(
            f"prefill 4 x 4096 in chunks of {chunk}", run.duration, "s", limit, of_limit=limit / run.duration,
            step_ms=statistics.median(spans) * 1e3,
            host_ms=statistics.median(done.host for _, done in run.recorder.done) * 1e3,
            idle_share=idle_share([done for _, done in run.recorder.done]),
        )  # fmt: skip


def time_mixed(report: Report, subject: Subject) -> None:
    """Small chunks beside decodes, with graphs and without."""
    backend = subject.backend
    graphs = backend._graphs
    for chunk in (128, 256, 512):
        for name, used in (("graphs", graphs), ("no graphs", None)):
            backend._graphs = used
            run = served(backend, alike(32, 512, 64, seed=800 + chunk + bool(used)), policy(chunk, 2))
            backend._graphs = graphs
            mixed = [done for step, done in run.recorder.done if any(part.length > 1 for part in step.slices)]
            report.row(
                f"steps of {chunk} tokens, 32 x (512 + 64), {name}",
                statistics.median(b.finished - a.finished for a, b in pairwise(mixed)) * 1e3, "ms",
                device_ms=statistics.median(done.finished - done.started for done in mixed) * 1e3,
                host_ms=statistics.median(done.host for done in mixed) * 1e3,
                idle_share=idle_share(mixed), duration_s=run.duration,
            )  # fmt: skip
