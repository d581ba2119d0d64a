"""The seam to time and to devices: a backend carries out steps and owns the only clock."""

from __future__ import annotations

from math import inf
from typing import Protocol

from playground.core import Done, Spec, Step


class Backend(Protocol):
    """Carries out steps; decides nothing."""

    spec: Spec

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def launch(self, step: Step) -> None:
        """Start a step and return at once; several may be in flight."""
        ...

    def wait(self, until: float = inf) -> Done | None:
        """The next completion, in order of finish; None, with the clock at `until` or later, once that has passed.

        Nothing in flight and `until` infinite is a caller's error: `RuntimeError`.
        """
        ...

    def close(self) -> None:
        """Stop workers, free memory. Safe to call twice."""
        ...
