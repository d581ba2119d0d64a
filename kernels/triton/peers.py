"""Exchanges between GPUs that load from one another's memory: one launch each, for messages of some hundred kilobytes.

A call is a *round* of a team. Every rank writes its part into a slot of its own memory, raises flags in all others',
waits for theirs, and reads what they wrote. Sums are in float32 in the order of ranks, so all ranks get the same bits.
Rounds are numbered on the device: a graph that is replayed goes on counting.

How the memory came to be seen by all is no business of this module. Nothing here multicasts.

What callers must hold to: all ranks launch the same rounds with the same shapes in the same order, each of them on one
stream at a time; then grids are the same everywhere. A program waits for its counterparts on other devices, so all of a
grid must be resident at once: it has no more programs than the smallest device has multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import early, power_of_two, require
from kernels.triton.norm import MOST_WIDTH

SLOTS = tl.constexpr(2)
"""Slots of a window, which rounds use by turns.

Why two: when a rank writes for round r + 2, its round r + 1 has ended, for which it saw a flag of every other rank;
and those had raised it after their own round r had ended, so all that they read of this rank's slot of round r was
read. With one slot, a rank could write for r + 1 while another still reads for r.
"""

PUBLISH, COLLECT = tl.constexpr(1), tl.constexpr(2)
BOTH = PUBLISH.value | COLLECT.value
"""Halves of a round: on devices always both in one launch; one process that plays all ranks calls them apart."""

TILE = 8192
"""Bytes that a program moves at a time: two loads of 16 bytes a thread. All multiprocessors together then have about
a megabyte on its way, more than NVLink holds in a round trip."""

WARPS = 8


@dataclass(frozen=True, slots=True)
class Window:
    """Memory that all ranks of a team see, as one of them does: slots, then a flag for each program and rank."""

    rank: int
    size: int
    addresses: Tensor
    """int64 [size]: where each rank's memory begins, as this rank's device addresses it; multiples of 16."""
    state: Tensor
    """int64 [2], zeros at first, seen by this rank alone: rounds that have ended, programs of this one that have."""
    capacity: int
    """Bytes of a slot, a multiple of 16."""
    programs: int
    """The most that a grid may have, on every rank."""


def window_bytes(capacity: int, size: int, programs: int) -> int:
    """Bytes of memory that each rank of a window must show, zeroed."""
    return SLOTS.value * capacity + programs * size * 8


def add_sum(window: Window, partial: Tensor, x: Tensor, phase: int = BOTH) -> None:
    """x += the sum of all ranks' `partial`, in place, rounded once: both [T, H], contiguous, of one dtype."""
    require(
        partial.shape == x.shape and partial.dtype == x.dtype,
        f"add_sum: partial {_told(partial)} and x {_told(x)} must be of one shape and dtype",
    )
    check("add_sum", window.capacity, partial.nbytes, partial, x)
    if (count := x.numel()) == 0:
        return
    block = TILE // x.element_size()
    _add_sum[_grid(window, triton.cdiv(count, block))](
        partial, x, window.addresses, window.state, count, window.capacity, window.rank, window.size, BLOCK=block,
        PHASE=phase, num_warps=WARPS, **early(x.device),
    )  # fmt: skip


def add_sum_norm(window: Window, partial: Tensor, x: Tensor, weight: Tensor, eps: float, phase: int = BOTH) -> Tensor:
    """`add_sum`, and then rms_norm(x) by weight [H]: [T, H]. The norm is of x as it is stored, rounding included."""
    require(
        partial.shape == x.shape and partial.dtype == x.dtype and x.dim() == 2,
        f"add_sum_norm: partial {_told(partial)} and x {_told(x)} must be of one shape [T, H] and dtype",
    )
    require(weight.shape == x.shape[1:], f"add_sum_norm: weight {_told(weight)} for rows of {x.shape[1]}")
    require(x.shape[1] <= MOST_WIDTH, f"add_sum_norm: rows of {x.shape[1]}, at most {MOST_WIDTH}")
    check("add_sum_norm", window.capacity, partial.nbytes, partial, x, weight)
    out = torch.empty_like(x)
    if out.numel():
        width = x.shape[1]
        _add_sum_norm[_grid(window, len(x))](
            partial, x, weight, out, window.addresses, window.state, len(x), eps, window.capacity, window.rank,
            window.size, WIDTH=width, PADDED=power_of_two(width), PHASE=phase,
            num_warps=min(max(power_of_two(width) // 512, 1), 16), **early(x.device),
        )  # fmt: skip
    return out


def gather(window: Window, x: Tensor, phase: int = BOTH) -> Tensor:
    """[rows, width] of every rank side by side: [rows, size * width]; of any dtype, contiguous."""
    require(x.dim() == 2, f"gather: x {_told(x)} must be [rows, width]")
    check("gather", window.capacity, x.nbytes, x)
    rows, width = x.shape
    out = x.new_empty(rows, window.size * width)
    if out.numel():
        block = min(TILE // x.element_size(), power_of_two(width))
        _gather[_grid(window, rows * triton.cdiv(width, block))](
            x, out, window.addresses, window.state, rows, width, window.capacity, window.rank, window.size,
            BLOCK=block, PHASE=phase, num_warps=WARPS, **early(x.device),
        )  # fmt: skip
    return out


def gather_rows(window: Window, x: Tensor, phase: int = BOTH) -> Tensor:
    """[n, width] of every rank one below the other: [size * n, width]; of any dtype, contiguous."""
    require(x.dim() == 2, f"gather_rows: x {_told(x)} must be [n, width]")
    check("gather_rows", window.capacity, x.nbytes, x)
    return gather(window, x.view(1, -1), phase).view(window.size * len(x), x.shape[1])


def scatter_sum(window: Window, x: Tensor, phase: int = BOTH) -> Tensor:
    """This rank's rows of the sum over all ranks: of [size * n, width], contiguous, its n: [n, width]."""
    require(
        x.dim() == 2 and len(x) % window.size == 0, f"scatter_sum: x {_told(x)} must have n rows for each of "
        f"{window.size} ranks",
    )  # fmt: skip
    check("scatter_sum", window.capacity, x.nbytes, x)
    out = x.new_empty(len(x) // window.size, x.shape[1])
    if count := out.numel():
        block = TILE // x.element_size()
        _scatter_sum[_grid(window, triton.cdiv(count, block))](
            x, out, window.addresses, window.state, count, window.capacity, window.rank, window.size, BLOCK=block,
            PHASE=phase, num_warps=WARPS, **early(x.device),
        )  # fmt: skip
    return out


def check(name: str, capacity: int, nbytes: int, *tensors: Tensor) -> None:
    """Refuse what does not fit a slot, and what does not lie in one piece."""
    require(nbytes <= capacity, f"{name}: {nbytes} bytes do not fit a slot of {capacity}")
    for tensor in tensors:
        require(tensor.is_contiguous(), f"{name}: {_told(tensor)} must be contiguous")


def _grid(window: Window, tiles: int) -> tuple[int]:
    return (min(tiles, window.programs),)


def _told(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


@triton.jit
def _flag(base, capacity, program, source, SIZE):
    """Where `source` says at `base` that it has published a program's tiles."""
    return (base + SLOTS * capacity + (program * SIZE + source) * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _slot(addresses, rank, round, capacity, element: tl.constexpr):
    """Where a rank's slot of a round is."""
    slot = (tl.load(addresses + rank) + (round % SLOTS) * capacity).to(tl.pointer_type(element))
    return tl.multiple_of(slot, 16)  # or it would be loaded by the element


@triton.jit
def _publish(addresses, round, capacity, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tell all others that this program's tiles of the round are in this rank's slot."""
    # One thread raises the flag, for all threads of the program: a release speaks for what the barrier ordered before.
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = _flag(tl.load(addresses + peer), capacity, tl.program_id(0), RANK, SIZE)
            tl.atomic_xchg(flag, round + 1, sem="release", scope="sys")


@triton.jit
def _await(addresses, round, capacity, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Until every other rank's same program has published. Flags are polled where they are near: in own memory."""
    mine = tl.load(addresses + RANK)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            until_above(_flag(mine, capacity, tl.program_id(0), peer, SIZE), round)
    tl.debug_barrier()


@triton.jit
def until_above(flag, number):
    """Not "until equal": who raised it may be a round ahead."""
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") <= number:
        pass


@triton.jit
def last_of(state, number):
    """Whether all other programs of the grid were here before, and so have read `number`: then it is raised."""
    tl.debug_barrier()
    last = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(state + 1, 0)
        tl.store(state, number + 1)
    return last


@triton.jit
def _sum(addresses, round, capacity, place, real, SIZE: tl.constexpr, BLOCK: tl.constexpr, element: tl.constexpr):
    """Of what all ranks have at a place of their slots, in float32, in the order of ranks."""
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        slot = _slot(addresses, peer, round, capacity, element)
        total += tl.load(slot + place, mask=real, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add_sum(
    partial, x, addresses, state, count, capacity, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PHASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    element: tl.constexpr = x.dtype.element_ty
    round = tl.load(state)
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if PUBLISH & PHASE:
        mine = _slot(addresses, RANK, round, capacity, element)
        for start in range(first, count, stride):
            place = start + tl.arange(0, BLOCK)
            tl.store(mine + place, tl.load(partial + place, mask=place < count), mask=place < count)
        _publish(addresses, round, capacity, RANK, SIZE)
    if COLLECT & PHASE:
        _await(addresses, round, capacity, RANK, SIZE)
        for start in range(first, count, stride):
            place = start + tl.arange(0, BLOCK)
            real = place < count
            total = _sum(addresses, round, capacity, place, real, SIZE, BLOCK, element)
            total += tl.load(x + place, mask=real, other=0.0).to(tl.float32)
            tl.store(x + place, total.to(element), mask=real)
        last_of(state, round)


@triton.jit(do_not_specialize=["rows"])
def _add_sum_norm(
    partial, x, weight, out, addresses, state, rows, eps, capacity, RANK: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PHASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    element: tl.constexpr = x.dtype.element_ty
    round = tl.load(state)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    if PUBLISH & PHASE:
        mine = _slot(addresses, RANK, round, capacity, element)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            place = row * WIDTH + column
            tl.store(mine + place, tl.load(partial + place, mask=real), mask=real)
        _publish(addresses, round, capacity, RANK, SIZE)
    if COLLECT & PHASE:
        weights = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
        _await(addresses, round, capacity, RANK, SIZE)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            place = row * WIDTH + column
            total = _sum(addresses, round, capacity, place, real, SIZE, PADDED, element)
            total += tl.load(x + place, mask=real, other=0.0).to(tl.float32)
            stored = total.to(element)
            tl.store(x + place, stored, mask=real)
            wide = stored.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
            tl.store(out + place, (wide * factor * weights).to(element), mask=real)
        last_of(state, round)


@triton.jit(do_not_specialize=["rows"])
def _gather(
    x, out, addresses, state, rows, width, capacity, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PHASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    element: tl.constexpr = x.dtype.element_ty
    round = tl.load(state)
    across = tl.cdiv(width, BLOCK)
    first, tiles, stride = tl.program_id(0), rows * across, tl.num_programs(0)
    if PUBLISH & PHASE:
        mine = _slot(addresses, RANK, round, capacity, element)
        for tile in range(first, tiles, stride):
            column = tile % across * BLOCK + tl.arange(0, BLOCK)
            place = tile // across * width + column
            tl.store(mine + place, tl.load(x + place, mask=column < width), mask=column < width)
        _publish(addresses, round, capacity, RANK, SIZE)
    if COLLECT & PHASE:
        _await(addresses, round, capacity, RANK, SIZE)
        for tile in range(first, tiles, stride):
            row, column = tile // across, tile % across * BLOCK + tl.arange(0, BLOCK)
            for peer in tl.static_range(SIZE):
                theirs = _slot(addresses, peer, round, capacity, element) + row * width + column
                target = out + row.to(tl.int64) * SIZE * width + peer * width + column
                tl.store(target, tl.load(theirs, mask=column < width), mask=column < width)
        last_of(state, round)


@triton.jit
def _scatter_sum(
    x, out, addresses, state, count, capacity, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PHASE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    element: tl.constexpr = x.dtype.element_ty
    round = tl.load(state)
    first, stride = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if PUBLISH & PHASE:
        mine = _slot(addresses, RANK, round, capacity, element)
        for start in range(first, count, stride):
            place = start + tl.arange(0, BLOCK)
            # What one program publishes for others, their same program sums: a flag then stands for all its tiles.
            for peer in tl.static_range(SIZE):
                part = peer * count + place
                tl.store(mine + part, tl.load(x + part, mask=place < count), mask=place < count)
        _publish(addresses, round, capacity, RANK, SIZE)
    if COLLECT & PHASE:
        _await(addresses, round, capacity, RANK, SIZE)
        for start in range(first, count, stride):
            place = start + tl.arange(0, BLOCK)
            real = place < count
            total = _sum(addresses, round, capacity, RANK * count + place, real, SIZE, BLOCK, element)
            tl.store(out + place, total.to(element), mask=real)
        last_of(state, round)
