"""Who gives way when memory is short, and how?

Sequences with nothing in flight come first: their blocks are free at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.draft import Draft, How
from playground.sequence import Sequence


def candidates(draft: Draft) -> list[Sequence]:
    """Running sequences with nothing in flight, else all running ones."""
    running = draft.running
    return [sequence for sequence in running if not sequence.in_flight] or list(running)


def _how(value: How | str) -> How:
    """As a member: configurations spell it out."""
    try:
        return How(value)
    except ValueError:
        raise ValueError(f"policy.victims.how={value} must be recompute or swap") from None


@dataclass(frozen=True)
class LastArrived:
    """The youngest request loses its KV. Source: vLLM v0 (SOSP'23 §4.5), Sarathi-Serve.

    vLLM v1 takes the last of its running list, which is another one only after a resumption: there an old request that
    comes back is the next victim again.
    """

    how: How = How.RECOMPUTE

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", _how(self.how))

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda sequence: (sequence.request.arrival, sequence.id))


@dataclass(frozen=True)
class Largest:
    """The one with the most blocks, the youngest among equals. Source: gLLM main (`c7dc791`, June 2026)."""

    how: How = How.RECOMPUTE

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", _how(self.how))

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda s: (len(s.blocks), s.request.arrival, s.id))
