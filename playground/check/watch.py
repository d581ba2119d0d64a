"""A policy under observation: it decides as it would, and what it saw and did is noted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from playground.check.alarm import bounded
from playground.check.laws import Broken
from playground.core import RequestView, Spec
from playground.draft import Draft
from playground.policy import ClusterView, Policy
from playground.sequence import Sequence, State

ENOUGH = 100
"""Preemptions of one sequence after which a run goes nowhere."""


class Passed(NamedTuple):
    """A decode that was ready while so many steps in a row served others; the last of them was planned at `until`."""

    steps: int
    sequence: int
    until: float


NOBODY = Passed(0, -1, 0.0)


@dataclass(slots=True)
class Seen:
    """What a policy did in one run."""

    passed: Passed = NOBODY
    preemptions: Counter[int] = field(default_factory=Counter)
    held: float = 0.0
    """Longest time, in seconds, that work was held back by a `wake` while nothing was in flight."""
    idle: str = ""
    """The first time that it was without one."""
    inversions: dict[int, str] = field(default_factory=dict)
    """First of each direction: by 1 where higher priorities go first, by -1 where lower ones do."""
    routes: list[int] = field(default_factory=list)


class Watched:
    """Stands between scheduler and policy. `run_ahead`: what to answer instead of the policy, if not None."""

    def __init__(self, policy: Policy, run_ahead: int | None) -> None:
        self.seen = Seen()
        self._policy = policy
        self._run_ahead = run_ahead
        self._gaps: dict[tuple[int, int], int] = {}
        """Steps of others since a decode was ready, by sequence and epoch."""
        self._lazy = True
        """Whether all ranks of the group that were asked so far placed nothing, and could have."""

    def run_ahead(self, spec: Spec) -> int:
        own = self._policy.run_ahead(spec)  # asked in any case: it may refuse the backend
        return own if self._run_ahead is None else self._run_ahead

    def steady(self, draft: Draft) -> int:
        return self._policy.steady(draft)

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        with bounded(f"`place` for request {request.id}"):
            rank = self._policy.place(request, view)
        if rank is not None:
            self.seen.routes.append(rank)
        return rank

    def fill(self, draft: Draft) -> None:
        ready, waiting = list(draft.decoding), list(draft.waiting)
        with bounded(f"`fill` at {draft.now:g} s, with {len(waiting)} waiting and {len(draft.running)} running,"):
            self._policy.fill(draft)
        self._note_preemptions(draft)
        self._note_passed(draft, ready)
        self._note_order(draft, waiting)
        self._note_idle(draft)

    def _note_preemptions(self, draft: Draft) -> None:
        for victim in draft.preempted:
            id = victim.sequence.id
            self.seen.preemptions[id] += 1
            if self.seen.preemptions[id] >= ENOUGH:
                raise Broken("preemption", f"sequence {id} lost its KV {ENOUGH} times, and no end is in sight")

    def _note_passed(self, draft: Draft, ready: list[Sequence]) -> None:
        """A step served somebody and left out a decode that was ready and for which there was memory."""
        if not draft.rows:
            return
        placed = set(draft.columns.sequence)
        for sequence in ready:
            key = sequence.id, sequence.epoch
            if sequence.id in placed or sequence.state is not State.RUNNING:
                self._gaps.pop(key, None)
            elif not sequence.in_flight and draft.blocks_needed(sequence, 1) <= draft.blocks_free:
                self._gaps[key] = steps = self._gaps.get(key, 0) + 1
                self.seen.passed = max(self.seen.passed, Passed(steps, sequence.id, draft.now))

    def _note_order(self, draft: Draft, waiting: list[Sequence]) -> None:
        """Someone of worse priority came in before someone like it, or kept its place at the other's cost."""
        admitted = [sequence for sequence in waiting if sequence.state is State.RUNNING]
        left = [sequence for sequence in waiting if sequence.state is State.WAITING]
        for one in admitted:
            for other in left:
                self._compare(one, other, "was started, and {other} waited")
        victims = [victim.sequence for victim in draft.preempted]
        for one in draft.running if victims else ():
            for other in victims:
                if one.request.priority != other.request.priority:
                    self._compare(one, other, "ran on, and {other} lost its KV")

    def _compare(self, one: Sequence, other: Sequence, what: str) -> None:
        difference = one.request.priority - other.request.priority
        if difference:
            told = what.format(other=f"request {other.id} (priority {other.request.priority})")
            wronged = -1 if difference > 0 else 1  # who believes lower to go first is wronged by a higher one
            text = f"request {one.id} (priority {one.request.priority}) {told}"
            self.seen.inversions.setdefault(wronged, text)

    def _note_idle(self, draft: Draft) -> None:
        """Ranks in lockstep are asked one after another, the last of them without peers: only together they idle."""
        moved = draft.preempted or draft.rejected or draft.sent or not draft.empty or draft.in_flight
        self._lazy &= not moved
        works = len(draft.waiting) + len(draft.running)
        if draft.peers:
            return
        lazy, self._lazy = self._lazy, True
        if not lazy or not works:
            return
        if draft.wake_at < inf:
            self.seen.held = max(self.seen.held, draft.wake_at - draft.now)
        elif not self.seen.idle:
            self.seen.idle = (
                f"at {draft.now:g} s nothing is in flight, {len(draft.waiting)} wait and {len(draft.running)} run, "
                "and nothing is placed"
            )


def watched(policy: Policy, run_ahead: int | None) -> Watched:
    """Under the policy's own name, which errors tell."""
    kind = type(type(policy).__name__, (Watched,), {})
    made: Watched = kind(policy, run_ahead)
    return made
