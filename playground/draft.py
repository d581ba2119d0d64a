"""What a policy sees of one rank, and the only verbs it may use, while it plans one step.

A draft keeps every law by itself: no verb can lose a block, over-commit memory or exceed a limit. A verb that cannot
do what it is asked says so in its answer and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from dataclasses import dataclass
from enum import Enum
from math import inf
from random import Random

from playground.core import COPY_IN, COPY_OUT, MAIN, Columns, Copy, LayerMove, Reject, Slice, Spec, Step
from playground.placed import Placed
from playground.rank import Rank
from playground.sequence import Sequence, State

_RUNNING = State.RUNNING
"""Looked up once: through its class a member of an enumeration takes longer than all else that is asked of a decode."""


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
    Do: `take`, `take_decodes`, `preempt`, `swap_in`, `reject`, `send`, `wake`, `move_layers`.
    """

    __slots__ = (
        "_admitted",
        "_intact",
        "_latest",
        "_placed",
        "_rank",
        "_tokens",
        "_tokens_left",
        "copies",
        "decoding",
        "in_flight",
        "layers",
        "move",
        "now",
        "ordinal",
        "partial",
        "peers",
        "preempted",
        "rejected",
        "rng",
        "sent",
        "spec",
        "wake_at",
    )

    def __init__(
        self,
        rank: Rank,
        spec: Spec,
        now: float,
        rng: Random,
        in_flight: tuple[Step, ...],
        ordinal: int,
        layers: tuple[int, ...] = (),
        peers: tuple[Draft, ...] = (),
    ) -> None:
        self._rank = rank
        self.ordinal = ordinal
        """Place of the step among all of its group's."""
        self.peers = peers
        """Of ranks in lockstep, those that are planned after this one: nothing is placed in them yet."""
        # A sampled token leaves the last stage `stages` steps after its step entered the first: planning its
        # sequence any sooner would stall the pipeline.
        self._latest = ordinal - spec.stages if spec.forwards_tokens else -1
        self._admitted: dict[int, Sequence] = {}
        self.now = now
        self.spec = spec
        self.rng = rng
        self.in_flight = in_flight
        """Steps of this rank's group that have not come back, oldest first; a repeated one as it was launched."""
        self.layers = layers
        """How many each stage holds; empty where they cannot move."""
        self.move: LayerMove | None = None
        self._placed = Placed()
        self._intact = True
        """Whether all of `decoding` are as they were: none of them placed, nobody preempted."""
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
        latest = self._latest
        for sequence in rank.running.values():  # `_due` and `decoding`, spelled out: every step comes here
            promised = sequence.promised
            if promised < sequence.max_tokens and (sequence.step <= latest or promised == sequence.returned):
                decodes = promised > 0 and sequence.length - sequence.launched == 1
                (self.decoding if decodes else self.partial).append(sequence)

    # --- see

    @property
    def admitted(self) -> bool:
        """Whether it let any sequence in."""
        return bool(self._admitted)

    @property
    def rows(self) -> int:
        """Slices placed so far."""
        return len(self._placed.sequence)

    @property
    def columns(self) -> Columns:
        """What was placed so far, by field."""
        return self._placed.columns(self._rank.index)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What was placed so far."""
        return self.columns.slices

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
        return self.spec.max_seqs - len(self._rank.running) - self._rank.copying

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
        # Nobody else can be in the middle of a prompt: all that a preemption keeps has returned.
        admitted = {sequence.id: sequence for sequence in self.partial} | self._admitted
        prefilling = [s for s in admitted.values() if s.state is _RUNNING and not s.decoding]
        return sum([blocks_for(s.length) - len(s.blocks) for s in prefilling])

    @property
    def rows_in_flight(self) -> int:
        """Slices of this rank in flight."""
        return sum(step.columns.rank.count(self._rank.index) for step in self.in_flight)

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

    @property
    def due(self) -> list[Sequence]:
        """Running sequences that may be placed now, in order of admission."""
        if self._intact and not self.partial and not self._admitted:
            return self.decoding[:]
        return self._due(self._rank.running.values())

    def ready(self, sequence: Sequence) -> bool:
        """Whether it is running and may be placed: not all promised, and its next input known in time."""
        return sequence.state is State.RUNNING and bool(self._due((sequence,)))

    def _due(self, running: Iterable[Sequence]) -> list[Sequence]:
        latest = self._latest
        return [s for s in running if s.promised < s.max_tokens and (s.step <= latest or s.promised == s.returned)]

    @property
    def empty(self) -> bool:
        """Nothing to compute and nothing to move."""
        return not self._placed.sequence and not self.copies

    # --- do

    def move_layers(self, layers: tuple[int, ...]) -> bool:
        """Have stages hold so many layers each from this step on; False where room lacks, or a stage would be empty."""
        first = self.spec.layers
        if len(layers) != len(first) or sum(layers) != sum(first) or layers == self.layers:
            return False
        if any(not 1 <= new <= old + self.spec.spare_layers for new, old in zip(layers, first, strict=True)):
            return False
        self.move = LayerMove(layers, self.spec.blocks - self._rank.pool.free)
        return True

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
        self._admitted[sequence.id] = sequence
        return self._place(sequence, count, lane)

    def _place(self, sequence: Sequence, count: int, lane: str) -> int:
        start = sequence.launched
        blocks = self._blocks(sequence, start + count)
        if blocks is None:
            return 0
        samples = start + count == sequence.length
        if sequence.promised:
            self._intact = False
        sequence.launched += count
        sequence.step = self.ordinal
        if samples:
            sequence.promised += 1
            sequence.length += 1
        self._placed.add(sequence, start, count, samples, blocks, lane)
        self._tokens += count
        self._tokens_left -= count
        return count

    def _blocks(self, sequence: Sequence, end: int) -> tuple[int, ...] | None:
        """Blocks that a slice up to `end` brings, taken from the pool if need be; None if that has too few."""
        need = self.spec.blocks_for(end) - len(sequence.blocks)
        if need > self._rank.pool.free:
            return None
        taken = self._rank.pool.allocate(need) if need > 0 else []
        sequence.blocks.extend(taken)
        if sequence.placed_epoch != sequence.epoch:  # a backend gets the whole table once, then what is new
            sequence.placed_epoch = sequence.epoch
            taken = sequence.blocks
        return tuple(taken)

    def take_decodes(self, sequences: list[Sequence], lane: str = MAIN) -> int:
        """Place one token for each of these decodes, in order, up to the first that cannot be; how many were placed."""
        size, ordinal = self.spec.block_size, self.ordinal
        starts: list[int] = []
        brought: dict[int, tuple[int, ...]] = {}
        sequences = sequences[: self._tokens_left]
        for sequence in sequences[: self._ready_decodes(sequences)]:  # most of what a step has goes through here
            start = sequence.launched
            if start >= len(sequence.blocks) * size or sequence.placed_epoch != sequence.epoch:
                blocks = self._blocks(sequence, start + 1)
                if blocks is None:
                    break
                brought[len(starts)] = blocks
            starts.append(start)
            sequence.launched = start + 1
            sequence.promised += 1
            sequence.length = start + 2
            sequence.step = ordinal
        placed = len(starts)
        if placed:
            self._intact = False
        self._placed.add_decodes(sequences[:placed], starts, brought, lane)
        self._tokens += placed
        self._tokens_left -= placed
        return placed

    def _ready_decodes(self, sequences: list[Sequence]) -> int:
        """How many of these, from the first one on, are decodes that may be placed, each once."""
        if self._intact and sequences == self.decoding[: len(sequences)]:
            return len(sequences)
        latest = self._latest
        seen: set[int] = set()
        for place, sequence in enumerate(sequences):
            promised = sequence.promised
            # `decoding` and `ready`, spelled out.
            if sequence.length - sequence.launched != 1 or not 0 < promised < sequence.max_tokens:
                return place
            if (sequence.step > latest and promised != sequence.returned) or sequence.state is not _RUNNING:
                return place
            if sequence.id in seen:
                return place
            seen.add(sequence.id)
        return len(sequences)

    def preempt(self, sequence: Sequence, how: How = How.RECOMPUTE) -> int:
        """Take a running sequence's KV away; how many blocks came free at once.

        What this draft had placed of it is taken back. With slices in flight its blocks come free when they commit
        (see `blocks_freeing`). Swapping is refused (0, and the sequence runs on) where `can_swap` says no.
        """
        if sequence.state is not State.RUNNING:
            raise ValueError(f"sequence {sequence.id} is {sequence.state.value}: only a running one can be preempted")
        if how is How.SWAP and not self.can_swap(sequence):
            return 0
        self._intact = False
        self._untake(sequence)
        freed = self._swap_out(sequence) if how is How.SWAP else self._rank.preempt(sequence)
        self.preempted.append(Preempted(sequence, how, freed))
        return freed

    def can_swap(self, sequence: Sequence) -> bool:
        """Whether it has KV to save (not if this draft admitted it), none of it in flight, and the host has room."""
        return sequence.id not in self._admitted and self._rank.can_swap(sequence)

    def _untake(self, sequence: Sequence) -> None:
        if sequence.id not in self._placed.sequence:
            return
        tokens, samples = self._placed.withdraw(sequence.id)
        sequence.launched -= tokens
        sequence.promised -= samples
        sequence.length -= samples
        self._tokens -= tokens
        self._tokens_left += tokens

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
