"""What a policy sees of one rank, and the only verbs it may use, while it plans one step.

A draft keeps every law by itself: no verb can lose a block, over-commit memory or exceed a limit. A verb that cannot
do what it is asked says so in its answer and changes nothing.
"""

from __future__ import annotations

from collections.abc import ValuesView
from dataclasses import dataclass
from enum import Enum
from math import inf
from random import Random

from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Reject, Slice, Spec, Step
from playground.rank import Rank
from playground.sequence import Sequence, State


class How(Enum):
    """What becomes of a victim's KV."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Preempted:
    """One victim of this draft. `freed`: blocks that came free at once."""

    sequence: Sequence
    how: How
    freed: int


class Draft:
    """One step of one rank, being planned.

    See: `now`, `spec`, `rank`, `rng`, `waiting`, `running`, `decoding`, `partial`, `in_flight`, `blocks_free`, ...
    Do: `take`, `take_decodes`, `preempt`, `swap_in`, `reject`, `send`, `wake`.
    """

    __slots__ = (
        "_admitted",
        "_forwards",
        "_lag",
        "_ordinal",
        "_rank",
        "_slices",
        "_taken",
        "_tokens",
        "_tokens_left",
        "copies",
        "decoding",
        "in_flight",
        "now",
        "partial",
        "preempted",
        "rejected",
        "rng",
        "sent",
        "spec",
        "wake_at",
    )

    def __init__(
        self, rank: Rank, spec: Spec, now: float, rng: Random, in_flight: tuple[Step, ...], ordinal: int
    ) -> None:
        self._rank = rank
        self._ordinal = ordinal
        self._forwards = spec.forwards_tokens
        # A sampled token leaves the last stage `stages` steps after its step entered the first: planning its
        # sequence any sooner would stall the pipeline.
        self._lag = spec.stages
        self._taken: dict[int, list[int]] = {}  # sequence -> places of its slices in `slices`
        self._admitted: set[int] = set()
        self.now = now
        self.spec = spec
        self.rng = rng
        self.in_flight = in_flight
        """Steps of this rank's group that have not come back, oldest first."""
        self._slices: list[Slice | None] = []
        self.copies: list[Copy] = []
        self.preempted: list[Preempted] = []
        self.rejected: list[Reject] = []
        self.sent: list[tuple[Sequence, int]] = []
        self._tokens = 0
        self._tokens_left = spec.max_tokens
        self.wake_at = inf
        self.decoding: list[Sequence] = []
        """Sequences whose next token may be asked for now, in order of admission."""
        self.partial: list[Sequence] = []
        """Admitted sequences whose prompt (or recomputation) is not all asked for, in order of admission."""
        for sequence in rank.running.values():
            if self.ready(sequence):
                (self.decoding if sequence.decoding else self.partial).append(sequence)

    # --- see

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What was placed so far."""
        return tuple([part for part in self._slices if part is not None])

    @property
    def tokens(self) -> int:
        """Tokens placed so far."""
        return self._tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that the step may still take."""
        return self._tokens_left

    @property
    def rank(self) -> int:
        return self._rank.index

    @property
    def waiting(self) -> ValuesView[Sequence]:
        """Not admitted, in order of arrival but for preempted ones in front.

        A live view, like `running`: copy it before you take or preempt while you walk through it.
        """
        return self._rank.waiting.values()

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting sequences still have to compute."""
        return self._rank.waiting_tokens

    @property
    def running(self) -> ValuesView[Sequence]:
        """Admitted, in order of admission, in flight or not. A live view."""
        return self._rank.running.values()

    @property
    def seats(self) -> int:
        """How many more sequences may be admitted."""
        copying = sum(sequence.state is State.COPYING for sequence in self._rank.limbo.values())
        return self.spec.max_seqs - len(self._rank.running) - copying

    @property
    def blocks_free(self) -> int:
        return self._rank.pool.free

    @property
    def blocks_freeing(self) -> int:
        """Blocks of preempted sequences that are free as soon as their slices in flight commit."""
        return self._rank.freeing

    @property
    def kv_free(self) -> float:
        """Share of the KV pool that is free, in [0, 1]."""
        return self._rank.pool.free / self.spec.blocks

    @property
    def blocks_owed(self) -> int:
        """Blocks that the admitted prompts will still need to be computed whole."""
        blocks_for = self.spec.blocks_for
        return sum(blocks_for(s.length) - len(s.blocks) for s in self._rank.running.values() if not s.decoding)

    @property
    def rows_in_flight(self) -> int:
        """Slices of this rank in flight."""
        return sum(part.rank == self._rank.index for step in self.in_flight for part in step.slices)

    def prefix_hit(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence would find in the prefix cache."""
        return len(self._rank.hit(sequence)) * self.spec.block_size

    def blocks_needed(self, sequence: Sequence, tokens: int) -> int:
        """Free blocks that computing the sequence's next `tokens` tokens would use up.

        For a waiting sequence `tokens` counts those that the prefix cache has, too: a hit that nobody else holds
        uses up a free block as well.
        """
        blocks_for = self.spec.blocks_for
        if sequence.state is not State.WAITING:
            return max(blocks_for(sequence.launched + tokens) - len(sequence.blocks), 0)
        hit = self._rank.hit(sequence)
        return max(blocks_for(tokens) - len(hit), 0) + self._rank.pool.idle(hit)

    def room(self, sequence: Sequence) -> int:
        """Most tokens of a running sequence that fit into the free blocks now."""
        held = len(sequence.blocks) + self._rank.pool.free
        return min(held * self.spec.block_size - sequence.launched, sequence.remaining)

    def ready(self, sequence: Sequence) -> bool:
        """Whether a running sequence may be placed: not all promised, and its next input known in time."""
        if sequence.state is not State.RUNNING or sequence.promised >= sequence.max_tokens:
            return False
        if sequence.promised == sequence.returned:
            return True
        return self._forwards and self._ordinal - sequence.step >= self._lag

    def taken(self, sequence: Sequence) -> bool:
        return sequence.id in self._taken

    @property
    def empty(self) -> bool:
        """Nothing to compute and nothing to move."""
        return not self._taken and not self.copies

    # --- do

    def take(self, sequence: Sequence, tokens: int, lane: str = MAIN) -> int:
        """Place up to `tokens` of the sequence's next tokens; how many were placed.

        A waiting sequence is admitted by it. All that the limits allow is placed, or 0: not ready, no seat, or not
        enough free blocks (ask `room` for a smaller number).
        """
        count = min(tokens, sequence.remaining, self._tokens_left)
        if count <= 0:
            return 0
        if sequence.state is State.WAITING:
            return self._admit(sequence, count, lane)
        return self._place(sequence, count, lane) if self.ready(sequence) else 0

    def _admit(self, sequence: Sequence, count: int, lane: str) -> int:
        if self.seats < 1:
            return 0
        hit = self._rank.hit(sequence)
        cached = len(hit) * self.spec.block_size
        count = min(count, sequence.length - cached)
        need = self.spec.blocks_for(cached + count) - len(hit)
        if need + self._rank.pool.idle(hit) > self._rank.pool.free:
            return 0
        self._rank.admit(sequence, hit, self.now)
        self._admitted.add(sequence.id)
        return self._place(sequence, count, lane)

    def _place(self, sequence: Sequence, count: int, lane: str) -> int:
        start = sequence.launched
        need = self.spec.blocks_for(start + count) - len(sequence.blocks)
        if need > self._rank.pool.free:
            return 0
        blocks = self._rank.pool.allocate(need) if need > 0 else []
        sequence.blocks.extend(blocks)
        if sequence.placed_epoch != sequence.epoch:  # a backend gets the whole table once, then what is new
            sequence.placed_epoch = sequence.epoch
            blocks = sequence.blocks
        samples = start + count == sequence.length
        part = Slice(sequence.id, sequence.epoch, self.rank, start, count, samples, tuple(blocks), lane)
        sequence.launched += count
        sequence.step = self._ordinal
        if samples:
            sequence.promised += 1
            sequence.length += 1
        self._taken.setdefault(sequence.id, []).append(len(self._slices))
        self._slices.append(part)
        self._tokens += count
        self._tokens_left -= count
        return count

    def take_decodes(self, sequences: list[Sequence], lane: str = MAIN) -> int:
        """Place one token for each of these decodes, in order, up to the first that cannot be; how many were placed."""
        pool, size, ordinal, index = self._rank.pool, self.spec.block_size, self._ordinal, self.rank
        slices, taken = self._slices, self._taken
        placed = 0
        for sequence in sequences:
            if placed == self._tokens_left or not (sequence.decoding and self.ready(sequence)):
                break
            start = sequence.launched
            blocks: tuple[int, ...] = ()
            if start >= len(sequence.blocks) * size:
                if not pool.free:
                    break
                blocks = tuple(pool.allocate(1))
                sequence.blocks.extend(blocks)
            if sequence.placed_epoch != sequence.epoch:
                sequence.placed_epoch = sequence.epoch
                blocks = tuple(sequence.blocks)
            sequence.launched = start + 1
            sequence.promised += 1
            sequence.length += 1
            sequence.step = ordinal
            taken[sequence.id] = [len(slices)]
            slices.append(Slice(sequence.id, sequence.epoch, index, start, 1, True, blocks, lane))
            placed += 1
        self._tokens += placed
        self._tokens_left -= placed
        return placed

    def preempt(self, sequence: Sequence, how: How = How.RECOMPUTE) -> int:
        """Take a running sequence's KV away; how many blocks came free at once.

        What this draft had placed of it is taken back. With slices in flight its blocks come free when they commit
        (see `blocks_freeing`). Swapping is refused (0, and the sequence runs on) where `can_swap` says no.
        """
        if sequence.state is not State.RUNNING:
            raise ValueError(f"sequence {sequence.id} is {sequence.state.value}: only a running one can be preempted")
        if how is How.SWAP and not self.can_swap(sequence):
            return 0
        self._untake(sequence)
        freed = self._swap_out(sequence) if how is How.SWAP else self._rank.preempt(sequence)
        self.preempted.append(Preempted(sequence, how, freed))
        return freed

    def can_swap(self, sequence: Sequence) -> bool:
        """Whether it has KV to save (not if this draft admitted it), none of it in flight, and the host has room."""
        return sequence.id not in self._admitted and self._rank.can_swap(sequence)

    def _untake(self, sequence: Sequence) -> None:
        for place in reversed(self._taken.pop(sequence.id, ())):
            part = self._slices[place]
            assert part is not None
            self._slices[place] = None
            sequence.launched -= part.length
            sequence.promised -= part.samples
            sequence.length -= part.samples
            self._tokens -= part.length
            self._tokens_left += part.length

    def _swap_out(self, sequence: Sequence) -> int:
        free = self._rank.pool.free
        source, target = self._rank.swap_out(sequence)
        self.copies.append(Copy(sequence.id, sequence.epoch, self.rank, source, target, COPY_OUT))
        return self._rank.pool.free - free

    def swap_in(self, sequence: Sequence) -> bool:
        """Start bringing a swapped sequence's KV back; it runs again when the copy is done. False: no room."""
        if sequence.state is not State.SWAPPED:
            raise ValueError(f"sequence {sequence.id} is {sequence.state.value}: only a swapped one can be swapped in")
        if self.seats < 1 or len(sequence.host_blocks) > self._rank.pool.free:
            return False
        source, target = self._rank.swap_in(sequence)
        self.copies.append(Copy(sequence.id, sequence.epoch, self.rank, source, target, COPY_IN))
        return True

    def reject(self, sequence: Sequence, why: str) -> None:
        """Turn a waiting sequence away for good."""
        if sequence.state is not State.WAITING:
            raise ValueError(f"sequence {sequence.id} is {sequence.state.value}: only a waiting one can be rejected")
        self._rank.end(sequence)
        self.rejected.append(Reject(sequence.id, why))

    def send(self, sequence: Sequence, rank: int) -> None:
        """Give a waiting sequence to another rank, where it queues from the next draft on."""
        if sequence.state is not State.WAITING:
            raise ValueError(f"sequence {sequence.id} is {sequence.state.value}: only a waiting one can be sent")
        if not 0 <= rank < self.spec.ranks:
            raise ValueError(f"rank {rank} does not exist: there are {self.spec.ranks}")
        self._rank.withdraw(sequence)
        self.sent.append((sequence, rank))

    def wake(self, at: float) -> None:
        """Ask to be consulted again at that time: a policy that holds work on purpose says so."""
        if not at > self.now:
            raise ValueError(f"wake({at}) is not after now={self.now}")
        self.wake_at = min(self.wake_at, at)
