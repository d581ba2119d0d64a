"""Scenes for policies: one rank with the sequences a test names, and a scheduler driven by hand.

Sequences are numbered as they come; a later one has arrived later.
"""

from __future__ import annotations

from collections import deque
from random import Random

from playground.core import Done, Request, Slice, Spec, Step
from playground.draft import Draft
from playground.rank import Rank
from playground.scheduler import Scheduler
from playground.sequence import Sequence


class Scene:
    """One rank and what it holds. Blocks have 16 tokens unless said otherwise."""

    def __init__(self, blocks=1000, seed=0, prefix_cache=True, **spec):
        self.spec = Spec(blocks=blocks, **spec)
        self.rank = Rank(0, self.spec, prefix_cache, requeue_front=True)
        self.rng = Random(seed)
        self.flights: list[Step] = []
        self.ordinal = 0
        self.requests = 0
        self.filled: list[int] = []

    def waits(self, prompt=100, max_tokens=100, arrival=None, **more) -> Sequence:
        """A request in the queue."""
        id, self.requests = self.requests, self.requests + 1
        request = Request(id, id if arrival is None else arrival, prompt, max_tokens, **more)
        sequence = Sequence(request, 0)
        sequence.keys = self.rank.keys(request)
        self.rank.enqueue(sequence)
        return sequence

    def partial(self, prompt, computed, **more) -> Sequence:
        """A prompt of which so many tokens are computed."""
        sequence = self.waits(prompt, **more)
        self.rank.admit(sequence, [], 0.0)
        sequence.blocks = self.rank.pool.allocate(self.spec.blocks_for(computed))
        sequence.launched = computed
        sequence.placed_epoch = 0
        return sequence

    def decodes(self, context=100, returned=1, **more) -> Sequence:
        """A sequence with so many tokens of KV, whose next token may be asked for."""
        sequence = self.partial(context + 1 - returned, context, **more)
        sequence.promised = sequence.returned = returned
        sequence.length = context + 1
        return sequence

    def flies(self, *sequences: Sequence) -> None:
        """A step in flight with the last token of each of these: prompts go on being partial, decodes sample."""
        parts = []
        for sequence in sequences:
            sequence.in_flight += 1
            samples = sequence.promised > 0
            if samples:  # the token in flight is promised, but has not returned
                sequence.returned -= 1
            parts.append(Slice(sequence.id, 0, 0, sequence.launched - 1, 1, samples, ()))
        self.flights.append(Step(self.ordinal, 0, 0.0, tuple(parts)))
        self.ordinal += 1

    def fill(self, blocks) -> None:
        """Blocks that nobody in the scene can have."""
        self.filled += self.rank.pool.allocate(blocks)

    def frees(self, blocks) -> None:
        """Some of them come free."""
        self.rank.pool.release([self.filled.pop() for _ in range(blocks)])

    def draft(self) -> Draft:
        return Draft(self.rank, self.spec, 10.0, self.rng, tuple(self.flights), self.ordinal + 1)


def plan(policy, scene: Scene) -> Draft:
    """What the policy makes of the scene."""
    draft = scene.draft()
    policy.fill(draft)
    return draft


def placed(draft: Draft) -> dict[int, int]:
    """Tokens of each sequence in the order they were placed."""
    return {part.sequence: part.length for part in draft.slices}


def victims(draft: Draft) -> list[int]:
    return [victim.sequence.id for victim in draft.preempted]


class Machine:
    """A scheduler with a backend that does what a test says: steps come back when it says so.

    `outputs`: how many tokens each request really gets; `max_tokens` if not told.
    """

    def __init__(self, policy, blocks=1000, seed=0, prefix_cache=False, **spec):
        self.spec = Spec(blocks=blocks, **spec)
        self.scheduler = Scheduler(self.spec, policy, seed=seed, prefix_cache=prefix_cache)
        self.flights: deque[Step] = deque()
        self.left: dict[int, int] = {}
        self.requests = 0
        self.clock = 0.0

    def arrive(self, prompt, output=100, max_tokens=None, count=1) -> None:
        for _ in range(count):
            id, self.requests = self.requests, self.requests + 1
            self.left[id] = output
            self.scheduler.arrive(Request(id, self.clock, prompt, max_tokens or output), self.clock)

    def step(self) -> dict[int, int]:
        """Plan and launch the next step: tokens of each sequence. Empty if there is none."""
        self.clock += 1.0
        step = self.scheduler.next_step(self.scheduler.groups[0], self.clock)
        if step is None:
            return {}
        self.flights.append(step)
        return {part.sequence: part.length for part in step.slices}

    def back(self) -> list[int]:
        """The oldest step in flight comes back; who got the last token."""
        self.clock += 1.0
        step = self.flights.popleft()
        sampled = [part.sequence for part in step.slices if part.samples]
        ended = [id for id in sampled if self._count(id) == 0]
        for lane in step.lanes:
            tokens = {part.sequence: (0,) for part in step.slices if part.samples and part.lane == lane}
            last = tuple(id for id in ended if id in tokens)
            self.scheduler.commit(Done(step.id, lane, 0.0, 0.0, self.clock, tokens, last))
        self.scheduler.check()
        return ended

    def _count(self, id: int) -> int:
        if id not in self.scheduler.sequences:  # ended before
            return -1
        self.left[id] -= 1
        return self.left[id]

    def turn(self) -> dict[int, int]:
        """One step, all the way."""
        taken = self.step()
        if taken:
            self.back()
        return taken

    @property
    def rejected(self) -> dict[int, str]:
        return {ended.request.id: ended.why for ended in self.scheduler.ended if ended.outcome == "rejected"}

    @property
    def preempted(self) -> list[int]:
        return [event.sequence for event in self.scheduler.events if event.kind in ("recompute", "swap")]
