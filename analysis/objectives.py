"""What goodput is counted against. Apart from the metrics, so that a run can name them without loading pandas."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives in seconds; `inf` where there is none."""

    ttft: float = inf
    tpot: float = inf
    e2el: float = inf
