"""What a stage of the kernels' benchmark found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.failures import failure


@dataclass
class Report:
    """What a stage found, in the order found."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    tuned: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    path: Path | None = None
    """Written after everything attempted, since a stage may be cut short."""

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out `work`; a failure is a line of the report, not the end of the stage."""
        try:
            return self._carry_out(name, work)
        finally:
            if self.path is not None:
                self.path.write_text(json.dumps(self.found()))

    def found(self) -> dict[str, list[Any]]:
        """Everything but where it is written."""
        return {name: getattr(self, name) for name in ("checks", "timings", "tuned", "failures")}

    def _carry_out(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever a kernel or its compiler raises, the others go on
            found = failure(name, error, longest=200)
            self.failures.append(found)
            print(f"FAILED {name}: {found['error']}", flush=True)
            return None

    def absorb(self, other: Mapping[str, Any]) -> None:
        """Add what another stage has found."""
        for name, found in self.found().items():
            found.extend(other.get(name, []))


def table_of(report: Report) -> str:
    lines = [f"{'kernel':20s} {'case':16s} {'us':>9s} {'rate':>13s} {'share':>6s}"]
    for row in report.timings:
        rate = f"{row['gbs']:.0f} GB/s" if "gbs" in row else f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        share = f"{row['share']:.0%}" if "share" in row else ""
        lines.append(f"{row['name']:20s} {row['case']:16s} {row['us']:9.1f} {rate:>13s} {share:>6s}")
    wrong = [check for check in report.checks if not check["good"]]
    lines.append(f"checks: {len(report.checks)} run, {len(wrong)} wrong; failures: {len(report.failures)}")
    lines += [f"  wrong: {c['name']} {c['dtype']} {c['error']:.2e}" for c in wrong[:20]]
    lines += [f"  failed: {f['name'][:60]}: {f['error'][:120]} ({f['at']})" for f in report.failures[:20]]
    return "\n".join(lines)
