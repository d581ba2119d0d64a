"""Policies that are ill on purpose, each with one of the diseases that the kit must find.

Sources: `policies.md` 0.4 and its table of issues (vLLM #41951, #40004, #25780, #47420, ...), `gllm.md` 1.6.
"""

import sys
from dataclasses import dataclass, field
from itertools import count

from playground.draft import How
from playground.scheduler import Scheduler
from playground.sequence import State
from policies.budget import ChunkedPrefill, Orca, TokenThrottling
from policies.composed import Admissions, Chunks, Composed, Decodes


def healthy() -> Composed:
    return Composed(ChunkedPrefill())


class Whole:
    """A policy of one piece: what it does not say of itself is as usual."""

    def place(self, request, view):
        return min(view.loads, key=lambda load: (load.waiting + load.running, load.rank)).rank

    def run_ahead(self, spec):
        return 1

    def steady(self, draft):
        return 0


class LifoDecodes(Whole):
    """gLLM's decode queue: what comes back goes to the left, and is taken from the left; a random share of it."""

    def fill(self, draft):
        stages = draft.spec.stages
        cap = (len(draft.running) + draft.rng.randint(0, stages - 1)) // stages or 1
        newest = sorted(draft.decoding, key=lambda sequence: -sequence.step)
        draft.take_decodes(newest[:cap])
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, sequence.remaining)
        if draft.empty and not draft.in_flight:
            healthy().fill(draft)


class HalfPrefilled(Whole):
    """Chunks of all prompts, and nobody's blocks can be taken: prompts that are half computed fill the pool."""

    def fill(self, draft):
        draft.take_decodes(draft.decoding)
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, 8) or (sequence.state is State.RUNNING and draft.take(sequence, draft.room(sequence)))


@dataclass(frozen=True)
class PromptsFirst:
    """The chunks of a long prompt come before all decodes and take the whole step."""

    def phases(self, draft):
        yield Chunks()
        yield Admissions()
        if not draft.tokens:
            yield Decodes()


class PingPong(Whole):
    """Whoever waits drives out whoever runs."""

    def fill(self, draft):
        if draft.waiting and draft.running:
            for sequence in list(draft.running):
                if not sequence.in_flight:
                    draft.preempt(sequence)
        for sequence in list(draft.waiting)[-1:]:
            draft.take(sequence, sequence.remaining)
        draft.take_decodes(draft.decoding)
        for sequence in draft.partial:
            draft.take(sequence, draft.room(sequence))


@dataclass(frozen=True)
class LowestFirst:
    """Lower priorities first."""

    def __call__(self, draft):
        return sorted(draft.waiting, key=lambda one: (one.request.priority, one.request.arrival, one.id))


@dataclass(frozen=True)
class BestLoses:
    """Memory is taken from the best priority."""

    how: How = How.RECOMPUTE

    def __call__(self, draft, needy):
        return min(draft.running, key=lambda one: (one.request.priority, one.id))


@dataclass(frozen=True)
class Window:
    """Priorities count among the first three of the queue only."""

    def __call__(self, draft):
        head = list(draft.waiting)[:3]
        return sorted(head, key=lambda one: (one.request.priority, one.id))


class FirstChunk(Whole):
    """Lets a prompt in when its first chunk fits; when the rest does not, the newest starts anew."""

    def fill(self, draft):
        for sequence in draft.decoding:
            while not draft.take_decodes([sequence]) and sequence.state is State.RUNNING:
                if not self._drop(draft):
                    break
        for sequence in list(draft.partial):
            if sequence.state is State.RUNNING and not draft.take(sequence, min(4, sequence.remaining)):
                self._drop(draft)
        for sequence in list(draft.waiting):
            draft.take(sequence, min(4, sequence.remaining))

    def _drop(self, draft):
        idle = [one for one in draft.running if not one.in_flight]
        if idle:
            draft.preempt(idle[-1])
        return bool(idle)


class WholeOnly(Whole):
    """Prompts are not cut, and one that no step can hold is waited for ever."""

    def fill(self, draft):
        draft.take_decodes(draft.decoding)
        for sequence in draft.partial:
            draft.take(sequence, draft.room(sequence))
        for sequence in list(draft.waiting):
            if sequence.remaining > draft.spec.max_tokens or not draft.take(sequence, sequence.remaining):
                break


class FirstOfEquals:
    """Fewest outstanding; among equals always the first."""

    def __call__(self, request, view):
        return min(view.loads, key=lambda load: (load.waiting + load.running, load.rank)).rank


class FullestFirst:
    """The sign of the load is wrong."""

    def __call__(self, request, view):
        return max(view.loads, key=lambda load: (load.running, load.waiting, -load.rank)).rank


@dataclass
class Rotating:
    """Fewest outstanding by the last report, ties in turns: what has been sent since is forgotten."""

    turn: count = field(default_factory=count)

    def __call__(self, request, view):
        fewest = min(load.waiting + load.running for load in view.loads)
        best = [load.rank for load in view.loads if load.waiting + load.running == fewest]
        return best[next(self.turn) % len(best)]


class HitsAgain(Whole):
    """Counts what a recomputation finds of its own as a hit of the prefix cache."""

    def fill(self, draft):
        waiting = list(draft.waiting)
        hits = {sequence.id: draft.prefix_hit(sequence) for sequence in waiting}
        healthy().fill(draft)
        for sequence in waiting:
            if sequence.state is State.RUNNING and sequence.preemptions:
                sequence.cached_tokens += hits[sequence.id]


class Random(Whole):
    """Chance of its own, that nobody seeds."""

    flips = count()

    def fill(self, draft):
        decoding = draft.decoding
        if next(self.flips) % 3 and len(decoding) > 1:
            decoding = decoding[1:]
        draft.take_decodes(decoding)
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, sequence.remaining)


class ByName(Whole):
    """Order by a hash of the id: no request is like another."""

    def fill(self, draft):
        draft.take_decodes(draft.decoding)
        queue = sorted([*draft.partial, *draft.waiting], key=lambda one: one.id * 37 % 11)
        for sequence in queue:
            draft.take(sequence, min(sequence.remaining, draft.room(sequence) if sequence.blocks else FAR))
        if draft.empty and not draft.in_flight:
            healthy().fill(draft)


FAR = 1 << 30


class Dozes(Whole):
    """Leaves the device alone until three wait, and says nothing of it."""

    def fill(self, draft):
        if len(draft.waiting) >= 3 or draft.running:
            healthy().fill(draft)


class Peeks(Whole):
    """Climbs up to the scheduler that calls it, which knows how long answers will be; serves the short half first."""

    def fill(self, draft):
        frame = sys._getframe()
        while not isinstance(scheduler := frame.f_locals.get("self"), Scheduler):
            frame = frame.f_back
        order = sorted(draft.decoding, key=lambda one: (scheduler.request(one.id).output_length, one.id))
        draft.take_decodes(order[: max(len(order) // 2, 1)])
        if not draft.rows:
            healthy().fill(draft)


class Promises(Whole):
    """Serves the half of the decodes that waited longest, and promises that it would be the same half again."""

    def fill(self, draft):
        order = sorted(draft.decoding, key=lambda sequence: sequence.step)
        draft.take_decodes(order[: -(-len(order) // 2)])
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, sequence.remaining)
        if draft.empty and not draft.in_flight:
            healthy().fill(draft)

    def steady(self, draft):
        return FAR


class ReachesAround(Whole):
    """Gives a sequence blocks of its own making, and takes more tokens than a step may have."""

    def fill(self, draft):
        for sequence in list(draft.waiting):
            draft._tokens_left = FAR
            draft.take(sequence, sequence.remaining)
        draft.take_decodes(draft.decoding)
        for sequence in draft.partial:
            draft.take(sequence, draft.room(sequence))


class DoubleUse(Whole):
    """Frees a running sequence's blocks behind the scheduler's back."""

    def fill(self, draft):
        for sequence in draft.decoding:
            if len(sequence.blocks) > 2:
                draft._rank.pool.release(sequence.blocks[:1])
        healthy().fill(draft)


class TurnsAway(Whole):
    """Rejects what does not fit now, and gives no reason."""

    def fill(self, draft):
        draft.take_decodes(draft.decoding)
        for sequence in [*draft.partial, *draft.waiting]:
            if not draft.take(sequence, sequence.remaining) and sequence.state is State.WAITING:
                draft.reject(sequence, "")


class Trickles(Whole):
    """Two tokens of prompts a step, whatever there is room for."""

    def fill(self, draft):
        Composed(ChunkedPrefill(len(draft.decoding) + 2)).fill(draft)


class Refuses(Whole):
    """Turns away what is longer than it likes, however much room there is."""

    def fill(self, draft):
        for sequence in list(draft.waiting):
            if sequence.remaining > 6:
                draft.reject(sequence, "too long")
        healthy().fill(draft)


class GivesUp(Whole):
    """Turns away who has lost its memory, in the middle of an answer."""

    def fill(self, draft):
        for sequence in list(draft.waiting):
            if sequence.returned:
                draft.reject(sequence, "no memory")
        healthy().fill(draft)


class Rewinds(Whole):
    """Sets a decode's counter back, so that a token is computed twice."""

    def fill(self, draft):
        for sequence in draft.decoding:
            sequence.launched -= 1
            draft.take(sequence, 2)
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, sequence.remaining)


class Skips(Whole):
    """Takes a token of every prompt that is cut for computed: nobody ever writes its KV."""

    def fill(self, draft):
        for sequence in draft.partial:
            if sequence.remaining > 1:
                sequence.launched += 1
        Composed(ChunkedPrefill(8)).fill(draft)


class ComparesAll(Whole):
    """Looks at every pair of those that wait: `work` is what that takes, in microseconds."""

    work = 0

    def fill(self, draft):
        healthy().fill(draft)
        type(self).work += len(draft.waiting) ** 2 + len(draft.running)


class Circles(Whole):
    """Tries again until there is memory: there never is, while it tries."""

    def fill(self, draft):
        for sequence in draft.decoding:
            while not draft.take(sequence, 1):
                pass
        for sequence in [*draft.partial, *draft.waiting]:
            draft.take(sequence, sequence.remaining)


class Crashes(Whole):
    """Divides by the number of those that wait."""

    def fill(self, draft):
        healthy().fill(draft)
        1 / len(draft.waiting) if draft.running else 0


def composed(budget=None, **choices):
    return lambda: Composed(budget or ChunkedPrefill(), **choices)


SICK = {
    "a decode queue that is last in, first out": (LifoDecodes, "starvation"),
    "prompts half computed fill the pool": (HalfPrefilled, "stall"),
    "a long prompt runs ahead of decodes": (composed(PromptsFirst()), "starvation"),
    "preemption ping-pong": (PingPong, "preemption"),
    "priority inversion: the best loses its memory": (
        composed(order=LowestFirst(), victims=BestLoses()),
        "priority",
    ),
    "priority inversion: only the head of the queue is looked at": (composed(order=Window()), "priority"),
    "admission by the first chunk": (FirstChunk, "waste"),
    "a request that never fits": (WholeOnly, "stall"),
    "hit rate counted on recomputed tokens": (HitsAgain, "hits"),
    "a router's ties go to the first": (composed(route=FirstOfEquals()), "ties"),
    "the fullest replica is chosen": (composed(route=FullestFirst()), "fuller"),
    "stale loads are dispatched to twice": (lambda: Composed(ChunkedPrefill(), route=Rotating()), "stale_loads"),
    "chance without a seed": (Random, "determinism"),
    "order by a hash of the name": (ByName, "permutation"),
    "a device left idle": (Dozes, "conservation"),
    "true output lengths": (Peeks, "oracle"),
    "a promise that is not kept": (Promises, "steady"),
    "more tokens than a step may have": (ReachesAround, "limits"),
    "a block used by two": (DoubleUse, "blocks"),
    "a request turned away without a reason": (TurnsAway, "ends"),
    "a prompt's tokens one by one": (Trickles, "pace"),
    "requests turned away for nothing": (Refuses, "welcome"),
    "requests turned away in the middle of an answer": (GivesUp, "welcome"),
    "a token computed twice": (Rewinds, "tokens"),
    "an exception": (Crashes, "errors"),
    "a loop without an end": (Circles, "returns"),
}
"""By disease: how to make a policy that has it, and the property that must fail."""
HEALTHY = {"chunked_prefill": healthy, "orca": composed(Orca()), "token_throttling": composed(TokenThrottling())}
