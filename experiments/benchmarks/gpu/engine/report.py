"""What a run of the engine's benchmark found, and how it is shown."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.failures import failure


@dataclass
class Report:
    """What the run found, in the order found; written after every part."""

    out: Path | None
    budget: float
    method: str = ""
    name: str = "gpu_engine"
    """Of the file."""
    began: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out `work` if there is time; a failure is a line of the report, not the end of the run."""
        began = time.perf_counter()
        if began - self.began > self.budget:
            self.failures.append({"name": name, "error": "no time left", "at": ""})
            return None
        print(f"[{began - self.began:5.0f}s] {name}", flush=True)
        result = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever is raised, the other parts go on
            found = failure(name, error, longest=300)
            self.failures.append(found)
            print(f"FAILED {name}: {found['error']} at {found['at']}", flush=True)
            traceback.print_exception(error, limit=-4, file=sys.stdout)
        self.seconds[name] = time.perf_counter() - began
        self.write()
        return result

    def check(self, name: str, good: bool, **details: Any) -> None:
        self.checks.append({"name": name, "good": good, **details})
        if not good:
            print(f"WRONG {name}: {details}", flush=True)

    def row(self, work: str, measured: float, unit: str, limit: float = 0.0, target: float = 0.0, **more: Any) -> None:
        self.rows.append(dict(work=work, limit=limit, target=target, measured=measured, unit=unit, **more))
        print(_line(self.rows[-1]), flush=True)

    def write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        found = {
            "method": self.method, "facts": self.facts, "rows": self.rows, "checks": self.checks,
            "failures": self.failures, "seconds": self.seconds,
        }  # fmt: skip
        (self.out / f"{self.name}.json").write_text(json.dumps(found, indent=1, default=str) + "\n")

    def show(self) -> None:
        good = sum(check["good"] for check in self.checks)
        print(f"\n{good} of {len(self.checks)} checks are good")
        for check in self.checks:
            if not check["good"]:
                print(f"  WRONG {check}")
        print(f"\n{'work':52s} {'limit':>9s} {'target':>9s} {'measured':>9s}")
        print("\n".join(_line(row) for row in self.rows))
        print("\n".join(f"FAILED {f['name']}: {f['error']} {f['at']}" for f in self.failures))


def reached(row: dict[str, Any]) -> bool:
    """Whether it is what it should be: a time at most, a ratio at least."""
    return bool(row["measured"] >= row["target"] if row["unit"] == "times" else row["measured"] <= row["target"])


def _line(row: dict[str, Any]) -> str:
    numbers = [f"{row[name]:9.3f}" if row[name] else " " * 9 for name in ("limit", "target", "measured")]
    known = {"work", "limit", "target", "measured", "unit"}
    more = ", ".join(f"{name} {_short(value)}" for name, value in row.items() if name not in known)
    missed = " MISSED" if row["target"] and not reached(row) else ""
    return f"{row['work']:52s} {' '.join(numbers)} {row['unit']}{missed}  {more}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
