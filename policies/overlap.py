"""What runs at the same time?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far planning runs ahead of results: `run_ahead` steps outstanding per pipeline stage.

    1: a step is planned when the last one is known. 2: the next step is planned while one runs, one step stale
    (asynchronous scheduling: vLLM 0.14, SGLang 0.4 "zero-overhead"); needs a backend that forwards tokens.
    """

    run_ahead: int = 1

    def __post_init__(self) -> None:
        if self.run_ahead < 1:
            raise ValueError(f"policy.overlap.run_ahead={self.run_ahead} must be at least 1")
