"""What must hold at a rate: figures of a summary within limits, and a queue that does not grow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.settings import SettingError

FORM = re.compile(r"(ttft|tpot|itl|e2el)_(mean|p50|p90|p99)")


@dataclass(frozen=True, slots=True)
class Objective:
    """A latency statistic of at most so many seconds, or an attainment of at least so much."""

    name: str
    limit: float

    @property
    def key(self) -> str:
        """Of a summary."""
        if self.name == "attainment":
            return "slo_attainment"
        metric, statistic = self.name.split("_")
        return f"{statistic}_{metric}_ms"

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """In the limit's unit; None where there is no sample."""
        found = summary.get(self.key)
        if found is None:
            return None
        return float(found) if self.name == "attainment" else float(found) / 1e3

    def holds(self, summary: Mapping[str, Any]) -> bool:
        found = self.value(summary)
        if found is None:
            return False
        return found >= self.limit if self.name == "attainment" else found <= self.limit


def objective(word: str) -> Objective:
    """From `ttft_p90=0.2` (seconds) or `attainment=0.9` (of slo.ttft and the like)."""
    name, _, value = word.partition("=")
    try:
        limit = float(value)
    except ValueError:
        raise SettingError(f"--slo {word}: needs a number, as ttft_p90=0.2") from None
    if name == "attainment":
        if not 0 < limit <= 1:
            raise SettingError(f"--slo {word}: must lie in (0, 1]")
    elif not FORM.fullmatch(name):
        raise SettingError(
            f"--slo {word}: give METRIC_STATISTIC=SECONDS, as ttft_p90=0.2 or tpot_mean=0.05, or attainment=0.9"
        )
    elif not limit > 0:
        raise SettingError(f"--slo {word}: must be above 0 seconds")
    return Objective(name, limit)


def missed(objectives: tuple[Objective, ...], summary: Mapping[str, Any], grows: bool) -> list[str]:
    """What does not hold, in words; nothing if all does."""
    told = [
        f"{one.name}={'-' if (value := one.value(summary)) is None else f'{value:.4g}'}"
        for one in objectives
        if not one.holds(summary)
    ]
    if grows:
        told.append("the queue grows")
    if summary.get("rejected"):
        told.append(f"{summary['rejected']} turned away")
    return told
