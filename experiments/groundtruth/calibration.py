"""What a source does not say of an engine, as values: fitted on rows marked `fit`, by engine and cost model.

Device times are never fitted: they come from sheets and kernel tables. How it is fitted: `fitting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Unknowns:
    """Host and front end, in seconds. The defaults are the cost model's: what is predicted when nothing is fitted."""

    base: float = 2e-4
    """Planning of each step that the engine fails to hide."""
    per_sequence: float = 3e-6
    """The same, of each sequence in a step."""
    eager: float = 6e-5
    """Launching the kernels of one layer of a step that is no CUDA graph: of one with prompts in it."""
    latency: float = 0.0
    """From a user's last token to the same user's next prompt at the scheduler; the same for all of a front end."""


Calibration = Mapping[str, Unknowns]
"""By engine; one that is not in it has the defaults."""

NOTHING: Calibration = {}


def as_json(calibration: Calibration) -> dict[str, dict[str, float]]:
    return {engine: asdict(unknowns) for engine, unknowns in calibration.items()}


def from_json(content: Mapping[str, Mapping[str, float]]) -> Calibration:
    return {engine: Unknowns(**values) for engine, values in content.items()}
