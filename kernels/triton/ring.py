"""A ring of slots from one GPU to another: what one puts, the other takes, in the same order, a launch at each end.

The slots lie in the taker's memory: data cross to it as soon as they are put, whatever the taker is doing then. Two
counters keep the ends apart: a flag for each program of the taker's grid says which message it may take, the putter's
`taken` how many have left the ring. The putter's stream waits when the ring is full, the taker's when it is empty; no
host does. Messages are numbered on the devices, so both ends may be in graphs that are replayed.

Both ends must handle the same messages, of the same shape and dtype, each on one stream at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import early
from kernels.triton.peers import TILE, WARPS, check, last_of, until_above


@dataclass(frozen=True, slots=True)
class Ring:
    """Memory of two ranks, as one of them sees it."""

    taken: Tensor
    """int64 [1]: the address of the putter's counter, zero at first: messages that were taken."""
    ring: Tensor
    """int64 [1]: the address of the taker's slots, then a flag (zero at first) a program; a multiple of 16."""
    state: Tensor
    """int64 [2], zeros at first, seen by this rank alone: messages handled, programs that are through with this one."""
    capacity: int
    """Bytes of a slot, a multiple of 16."""
    slots: int
    programs: int
    """The most that a grid may have, at both ends: as many as are resident at once."""


def ring_bytes(capacity: int, slots: int, programs: int) -> int:
    """Bytes of memory that the taker must show, zeroed; the putter shows 8."""
    return slots * capacity + programs * 8


def put(ring: Ring, x: Tensor) -> None:
    """Send x, contiguous, of any shape and dtype; x may be overwritten by what comes after on the stream."""
    check("put", ring.capacity, x.nbytes, x)
    if count := x.numel():
        block = TILE // x.element_size()
        _put[_grid(ring, count, block)](
            x, ring.taken, ring.ring, ring.state, count, ring.capacity, SLOTS=ring.slots, BLOCK=block,
            num_warps=WARPS, **early(x.device),
        )  # fmt: skip


def take(ring: Ring, like: Tensor) -> Tensor:
    """Fill `like`, contiguous, with the message that is next, which must be of its shape and dtype."""
    check("take", ring.capacity, like.nbytes, like)
    if count := like.numel():
        block = TILE // like.element_size()
        _take[_grid(ring, count, block)](
            like, ring.taken, ring.ring, ring.state, count, ring.capacity, SLOTS=ring.slots, BLOCK=block,
            num_warps=WARPS, **early(like.device),
        )  # fmt: skip
    return like


def _grid(ring: Ring, count: int, block: int) -> tuple[int]:
    return (min(triton.cdiv(count, block), ring.programs),)


@triton.jit
def _flag(base, capacity, SLOTS):
    """Which messages a program of the taker may take."""
    return (base + SLOTS * capacity + tl.program_id(0) * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _slot(base, number, capacity, SLOTS, element: tl.constexpr):
    return tl.multiple_of((base + (number % SLOTS) * capacity).to(tl.pointer_type(element)), 16)


@triton.jit
def _put(
    x, taken, ring, state, count, capacity, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number, base = tl.load(state), tl.load(ring)
    until_above(tl.load(taken).to(tl.pointer_type(tl.int64)), number - SLOTS)
    tl.debug_barrier()
    slot = _slot(base, number, capacity, SLOTS, x.dtype.element_ty)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(slot + place, tl.load(x + place, mask=place < count), mask=place < count)
    tl.debug_barrier()
    tl.atomic_xchg(_flag(base, capacity, SLOTS), number + 1, sem="release", scope="sys")
    last_of(state, number)


@triton.jit
def _take(
    out, taken, ring, state, count, capacity, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number, base = tl.load(state), tl.load(ring)
    until_above(_flag(base, capacity, SLOTS), number)
    tl.debug_barrier()
    slot = _slot(base, number, capacity, SLOTS, out.dtype.element_ty)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(out + place, tl.load(slot + place, mask=place < count), mask=place < count)
    if last_of(state, number):
        counter = tl.load(taken).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(counter, number + 1, sem="release", scope="sys")
