"""Planning one step ahead, as a request sees it: what arrives while a step runs starts after the next one.

An engine that plans step n + 1 while n runs knows nothing of what arrives meanwhile: it starts in n + 2. So here a step
admits what the step before it saw waiting, unless nothing runs. Unlike `overlap=run_ahead` it lets a simulation skip
quiet stretches (a tenth of the time); what is lost is the other side of running ahead, that hosts plan while devices
work, so host times are what the engine fails to hide.
"""

from __future__ import annotations

from dataclasses import replace

from playground.core import RequestView, Spec
from playground.draft import Draft
from playground.policy import ClusterView
from playground.sequence import Sequence
from policies.composed import Admission, Composed


class StepLate:
    """A composed policy of one rank that sees arrivals a step late."""

    def __init__(self, policy: Composed) -> None:
        self._before: frozenset[int] = frozenset()
        """Sequences that waited when the last step was planned."""
        self._policy = _admitting(policy, self)

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        return self._policy.place(request, view)

    def run_ahead(self, spec: Spec) -> int:
        return self._policy.run_ahead(spec)

    def steady(self, draft: Draft) -> int:
        return self._policy.steady(draft)

    def fill(self, draft: Draft) -> None:
        waiting = frozenset(sequence.id for sequence in draft.waiting)
        self._policy.fill(draft)
        self._before = waiting

    def knows(self, draft: Draft, sequence: Sequence) -> bool:
        return sequence.id in self._before or not draft.running


def _admitting(policy: Composed, late: StepLate) -> Composed:
    """The same policy, but for what it does not know yet."""
    inner: Admission = policy.admission

    def admission(draft: Draft, sequence: Sequence, tokens: int) -> bool:
        return late.knows(draft, sequence) and inner(draft, sequence, tokens)

    return replace(policy, admission=admission)
