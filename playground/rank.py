"""One data-parallel rank: its queues, its KV pools, and the moves a sequence can make between them.

Mechanism only. Who moves and when is decided in a draft (by a policy) or by what a backend reports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from hashlib import blake2b
from itertools import pairwise

from playground.core import Request, Spec
from playground.kv import BlockPool
from playground.policy import Load
from playground.sequence import Sequence, State


class Rank:
    """Sequences and blocks of one rank.

    `waiting` is in order of service: arrivals join at the back, preempted sequences at the front. `running` is in
    order of admission. `limbo` holds sequences that are neither: draining, copying, or ended with slices in flight.
    """

    __slots__ = (
        "copying",
        "freeing",
        "host",
        "index",
        "limbo",
        "pool",
        "prefix_cache",
        "requeue_front",
        "running",
        "spec",
        "waiting",
        "waiting_tokens",
    )

    def __init__(self, index: int, spec: Spec, prefix_cache: bool, requeue_front: bool) -> None:
        self.index = index
        self.spec = spec
        self.prefix_cache = prefix_cache
        self.requeue_front = requeue_front
        self.pool = BlockPool(spec.blocks)
        self.host = BlockPool(spec.host_blocks)
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        self.limbo: dict[int, Sequence] = {}
        self.waiting_tokens = 0
        """Tokens that the waiting sequences still have to compute (prefix-cache hits not taken off)."""
        self.freeing = 0
        """Blocks held by draining sequences: they come back without anything being done."""
        self.copying = 0
        """Sequences whose KV is on the way: each keeps a seat."""

    @property
    def live(self) -> bool:
        return bool(self.waiting or self.running or self.limbo)

    def load(self) -> Load:
        return Load(
            self.index,
            len(self.waiting),
            len(self.running),
            self.waiting_tokens,
            self.pool.free,
            self.pool.blocks,
        )

    # --- queues

    def enqueue(self, sequence: Sequence) -> None:
        self.waiting[sequence.id] = sequence
        self.waiting_tokens += sequence.remaining

    def requeue(self, sequence: Sequence) -> None:
        self.enqueue(sequence)
        if self.requeue_front:
            self.waiting.move_to_end(sequence.id, last=False)

    def withdraw(self, sequence: Sequence) -> None:
        del self.waiting[sequence.id]
        self.waiting_tokens -= sequence.remaining

    # --- prefix cache

    def keys(self, request: Request) -> tuple[Hashable, ...]:
        return prefix_keys(request, self.spec.block_size) if self.prefix_cache else ()

    def hit(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache that a waiting sequence would start with.

        One token is always left to compute, since its logits are wanted.
        """
        if not sequence.keys:
            return []
        return self.pool.find(sequence.keys[: (sequence.length - 1) // self.spec.block_size])

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Make the prompt blocks that are complete at `computed` tokens findable."""
        full = min(len(sequence.keys), computed // self.spec.block_size)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], sequence.keys[index])
        sequence.published = max(sequence.published, full)

    # --- life of a sequence

    def admit(self, sequence: Sequence, hit: list[int], now: float) -> None:
        """From waiting to running, with a cached prefix that is held from now on."""
        self.withdraw(sequence)
        self.pool.share(hit)
        sequence.blocks = hit
        sequence.launched = len(hit) * self.spec.block_size
        sequence.published = len(hit)
        sequence.state = State.RUNNING
        if sequence.admitted is None:
            sequence.admitted = now
            sequence.cached_tokens = sequence.launched
        self.running[sequence.id] = sequence

    def preempt(self, sequence: Sequence) -> int:
        """Give up a running sequence's KV; blocks freed at once (none while slices of it are in flight)."""
        del self.running[sequence.id]
        sequence.preemptions += 1
        sequence.target = max(sequence.target, sequence.launched)
        if sequence.in_flight:
            self._drain(sequence)
            return 0
        return self._reset(sequence)

    def _drain(self, sequence: Sequence) -> None:
        sequence.state = State.DRAINING
        self.limbo[sequence.id] = sequence
        self.freeing += len(sequence.blocks)

    def _reset(self, sequence: Sequence) -> int:
        """Back to the queue with nothing computed; only returned tokens are kept."""
        before = self.pool.free
        self._drop_blocks(sequence)
        sequence.launched = 0
        sequence.promised = sequence.returned
        sequence.length = sequence.request.prompt_length + sequence.returned
        sequence.epoch += 1
        sequence.state = State.WAITING
        self.requeue(sequence)
        return self.pool.free - before

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self.host.release(sequence.host_blocks)
        sequence.blocks = []
        sequence.host_blocks = []
        sequence.published = 0

    def end(self, sequence: Sequence) -> None:
        """No more tokens: blocks go now, or when the last slice or copy in flight commits."""
        if sequence.state in (State.WAITING, State.SWAPPED):
            self.withdraw(sequence)
        self.running.pop(sequence.id, None)
        if sequence.in_flight and sequence.id not in self.limbo:
            self._drain(sequence)
        if sequence.id not in self.limbo:
            self._drop_blocks(sequence)
        self.copying -= sequence.state is State.COPYING
        sequence.state = State.ENDED

    def settle(self, sequence: Sequence) -> None:
        """A sequence in limbo whose last slice in flight has committed finds its place."""
        del self.limbo[sequence.id]
        self.freeing -= len(sequence.blocks)
        if sequence.state is State.ENDED:
            self._drop_blocks(sequence)
        else:
            self._reset(sequence)

    # --- swapping

    def swap_out(self, sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Start moving a running sequence's KV to the host: (device blocks, host blocks). Ask `can_swap` first."""
        del self.running[sequence.id]
        sequence.preemptions += 1
        kept = self.spec.blocks_for(sequence.launched)
        self.pool.release(sequence.blocks[kept:])
        sequence.blocks = sequence.blocks[:kept]
        sequence.host_blocks = self.host.allocate(kept)
        self._copy(sequence)
        return tuple(sequence.blocks), tuple(sequence.host_blocks)

    def swap_in(self, sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Start moving a swapped sequence's KV back: (host blocks, device blocks)."""
        self.withdraw(sequence)
        sequence.blocks = self.pool.allocate(len(sequence.host_blocks))
        self._copy(sequence)
        sequence.placed_epoch = sequence.epoch  # the copy names the blocks
        return tuple(sequence.host_blocks), tuple(sequence.blocks)

    def can_swap(self, sequence: Sequence) -> bool:
        return not sequence.in_flight and self.spec.blocks_for(sequence.launched) <= self.host.free

    def _copy(self, sequence: Sequence) -> None:
        sequence.epoch += 1
        sequence.state = State.COPYING
        self.copying += 1
        sequence.in_flight += 1
        self.limbo[sequence.id] = sequence
        # Its blocks change hands when the copy is done, not by draining, so `freeing` stays as it is; see `copied`.

    def copied_out(self, sequence: Sequence) -> None:
        """The host has the KV: the device's blocks are free."""
        if self._copy_was_given_up(sequence):
            return
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.published = 0
        sequence.state = State.SWAPPED
        self.requeue(sequence)

    def copied_in(self, sequence: Sequence) -> None:
        """The device has the KV again: the sequence runs on."""
        if self._copy_was_given_up(sequence):
            return
        self.host.release(sequence.host_blocks)
        sequence.host_blocks = []
        sequence.keys = ()  # its new blocks are its own: nothing of them is published
        sequence.state = State.RUNNING
        self.running[sequence.id] = sequence

    def _copy_was_given_up(self, sequence: Sequence) -> bool:
        sequence.in_flight -= 1
        del self.limbo[sequence.id]
        if sequence.state is not State.ENDED:
            self.copying -= 1
            return False
        self._drop_blocks(sequence)
        return True

    # --- law

    def check(self) -> None:
        """Queues, counters and blocks agree; `AssertionError` says what does not."""
        self.pool.check()
        self.host.check()
        assert self.waiting_tokens == sum(s.remaining for s in self.waiting.values()), "waiting_tokens"
        everybody = [*self.waiting.values(), *self.running.values(), *self.limbo.values()]
        assert self.copying == sum(s.state is State.COPYING for s in self.limbo.values()), "copying"
        assert len({s.id for s in everybody}) == len(everybody), "a sequence is in two queues"
        references = [0] * self.pool.blocks
        for sequence in everybody:
            sequence.check()
            for block in sequence.blocks:
                references[block] += 1
            enough = sequence.state not in (State.RUNNING,) or (
                len(sequence.blocks) >= self.spec.blocks_for(sequence.launched)
            )
            assert enough, f"sequence {sequence.id} has KV without blocks"
        assert references == self.pool._references, "blocks held and blocks counted differ"
        assert len(self.running) <= self.spec.max_seqs, "max_seqs"


def prefix_keys(request: Request, block_size: int) -> tuple[Hashable, ...]:
    """One key for every full block of the prompt that the request's hashes cover."""
    return chained_keys(request.hashes, request.hash_block, request.prompt_length, block_size)


def chained_keys(hashes: tuple[int, ...], hash_block: int, length: int, block_size: int) -> tuple[Hashable, ...]:
    """One key for every full block of a prompt of so many tokens that its hashes cover.

    The hashes are chained, so the one that covers a block's last token vouches for everything before; a partial last
    hash vouches for the tokens it covers.
    """
    if hash_block == block_size:
        return hashes[: length // block_size]
    covered = min(length, len(hashes) * hash_block)
    ends = range(block_size, covered + 1, block_size)
    return tuple((hashes[(end - 1) // hash_block], end) for end in ends)


def hash_tokens(tokens: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Chained 63-bit ids (BLAKE2b) of the full blocks of a prompt, for requests that carry their tokens."""
    edges = range(0, len(tokens) - len(tokens) % block_size + 1, block_size)
    ids: list[int] = []
    previous = b""
    for start, end in pairwise(edges):
        content = b"".join(token.to_bytes(8, "little") for token in tokens[start:end])
        previous = blake2b(previous + content, digest_size=8).digest()
        ids.append(int.from_bytes(previous, "little") >> 1)
    return tuple(ids)
