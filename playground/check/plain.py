"""The plainest policy that does: what others take for a case is measured by what it takes."""

from __future__ import annotations

from playground.core import RequestView, Spec
from playground.draft import Draft
from playground.policy import ClusterView
from playground.sequence import Sequence, State


class Plain:
    """First come, first served: decodes, then prompts under way, then new ones whose whole prompt fits.

    Memory for a decode is taken from who came last; the replica with the least outstanding gets the next request.
    """

    def fill(self, draft: Draft) -> None:
        self._decode(draft)
        for sequence in draft.partial:
            draft.take(sequence, min(sequence.remaining, draft.room(sequence)))
        if draft.preempted:
            return
        for sequence in list(draft.waiting):
            fits = draft.blocks_needed(sequence, sequence.remaining) <= draft.blocks_free
            if not fits or not draft.take(sequence, sequence.remaining):
                break

    def _decode(self, draft: Draft) -> None:
        for sequence in list(draft.decoding):
            while sequence.state is State.RUNNING and not draft.take_decodes([sequence]):
                if (victim := _last(draft)) is None:
                    break
                draft.preempt(victim)

    def place(self, request: RequestView, view: ClusterView) -> int:
        return min(view.loads, key=lambda load: (load.waiting + load.running, load.rank)).rank

    def run_ahead(self, spec: Spec) -> int:
        return 1

    def steady(self, draft: Draft) -> int:
        return 0


def _last(draft: Draft) -> Sequence | None:
    """Who came last of those that may lose their memory."""
    placed = set(draft.columns.sequence)
    idle = [one for one in draft.running if not one.in_flight and one.id not in placed]
    return max(idle, key=lambda one: (one.request.arrival, one.id), default=None)
