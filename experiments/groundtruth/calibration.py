"""What a source does not say of an engine, as values: fitted on rows marked `fit`, by engine and cost model.

Device times are never fitted: they come from sheets and kernel tables. How it is fitted: `fitting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Unknowns:
    """The host's share of a step (seconds), the front end's of a request (seconds), and the token budget of a step.

    The defaults are the cost model's and the server's own: what is predicted when nothing is fitted.
    """

    base: float = 2e-4
    """Of each step."""
    per_sequence: float = 3e-6
    """Of each sequence in a step."""
    service: float = 0.0
    """HTTP and tokenizer, one request after another."""
    max_tokens: int | None = None
    """None: the server's default."""


Calibration = Mapping[str, Unknowns]
"""By engine; one that is not in it has the defaults."""

NOTHING: Calibration = {}


def as_json(calibration: Calibration) -> dict[str, dict[str, float]]:
    return {engine: asdict(unknowns) for engine, unknowns in calibration.items()}


def from_json(content: Mapping[str, Mapping[str, float]]) -> Calibration:
    return {engine: Unknowns(**values) for engine, values in content.items()}  # type: ignore[arg-type]
