"""The seam to time and to devices: a backend carries out steps and owns the only clock."""

from __future__ import annotations

from math import inf
from typing import Protocol

from playground.core import Done, Spec, Step, Turn


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


class Repeating(Backend, Protocol):
    """A backend that repeats steps by itself, where `Spec.repeats` holds: see `Step.repeat`.

    It begins no repetition that the caller, coming back from `wait`, might have decided otherwise.
    """

    def turns(self, group: int, stop: bool) -> list[Turn]:
        """How far the group's repeated steps are by now, in the order in which their last repetitions were decided.

        `stop`: those that are launched come back when the repetitions that have begun are done.
        """
        ...
