"""256 requests at once."""

from __future__ import annotations

import statistics

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import alike, idle_share, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject


def time_serve(report: Report, subject: Subject) -> None:
    """256 requests at once: prompts at the matrix units' rate, then decode steps that read weights and KV."""
    limit = subject.prefill_limit(256, 512, 128) + 64 * subject.limit(256, 560)
    for tokens, ahead in ((2048, 2), (8192, 2), (1024, 2), (2048, 1), (2048, 3)):
        run = served(subject.backend, alike(256, 512, 128, seed=tokens + ahead), policy(tokens, ahead))
        done = [done for _, done in run.recorder.done]
        mixed = [(step, done) for step, done in run.recorder.done if any(part.length > 1 for part in step.slices)]
        report.row(
            f"256 x (512 + 128) at once, {tokens} a step, ahead {ahead}", run.duration, "s", limit, 6.0,
            output_tokens_per_s=256 * 128 / run.duration, steps=len(done), idle_share=idle_share(done),
            mixed_steps=len(mixed),
            mixed_device_ms=statistics.median(done.finished - done.started for _, done in mixed) * 1e3,
            mixed_host_ms=statistics.median(done.host for _, done in mixed) * 1e3,
        )  # fmt: skip
        full = run.decodes(256)
        if full:
            ids = [step.id for step, _ in full]
            planning, preparing = run.watched.planning, run.watched.preparing
            report.row(
                f"  host a step of 256 decodes, ahead {ahead}",
                statistics.median(planning[id] + preparing[id] for id in ids) * 1e3, "ms", 0.0, 1.0,
                scheduling_ms=statistics.median(planning[id] for id in ids) * 1e3,
                launch_ms=statistics.median(preparing[id] for id in ids) * 1e3,
                tokens_in_ms=statistics.median(run.watched.landing[-len(ids) :]) * 1e3,
                device_ms=statistics.median(done.finished - done.started for _, done in full) * 1e3,
                idle_share=idle_share([done for _, done in full]),
            )  # fmt: skip
