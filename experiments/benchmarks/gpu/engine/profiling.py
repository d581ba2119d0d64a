"""Where a decode step's time goes."""

from __future__ import annotations

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import alike, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject


def profile(report: Report, subject: Subject) -> None:
    """Where a decode step's time goes, kernel by kernel, where the driver lets us see."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    for rows, context in ((1, 512), (32, 1024), (128, 1024)):
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            served(subject.backend, alike(rows, context - 16, 24, seed=700 + rows), policy(8192, 2))
        shown = sorted(seen.key_averages(), key=lambda item: -item.device_time_total)[:14]
        kernels = [(item.key[:70], item.count, round(item.device_time_total / max(item.count, 1), 2)) for item in shown]
        report.facts[f"profile {rows} x {context}"] = kernels
        print(f"profile {rows} x {context} (with its prefill):", flush=True)
        print("\n".join(f"  {each:9.2f} us x {count:6d}  {name}" for name, count, each in kernels), flush=True)
