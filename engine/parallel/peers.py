"""Exchanges between ranks whose GPUs see one another's memory, for small messages: a launch each, no host involved.

NCCL's all-reduce costs some 40 microseconds however small it is. Here a rank's part is loaded by all others from
where it lies (`kernels.triton.peers`). Sums are taken in float32 in the order of ranks and rounded once, so all ranks
have the same bits, and not quite those of NCCL. Calls may be captured in CUDA graphs.

All ranks make the same calls, with the same shapes, in the same order, each on one stream at a time: a rank that does
not leaves the others' devices waiting for ever. What does not `fit` is the caller's to send by other ways.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import EngineError
from engine.parallel import ipc
from kernels.triton import peers, ring
from kernels.triton.launch import multiprocessors

ALIGNMENT = 256
"""Bytes of which a slot's size is a multiple, so that all slots are aligned."""

RING_PROGRAMS = 16
"""The most programs of a ring's end. They may wait for long beside what computes, and must leave it most of the device:
on every multiprocessor they could keep a large product from starting that the other end waits for. Each moves some
20 GB/s over NVLink; a guess, not measured."""


class Peers:
    """A team of ranks on GPUs of one host, in processes of their own."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device, capacity: int) -> None:
        """`group`: over Gloo, of `size` ranks, this one being `rank`; `capacity`: the most bytes that a rank may give.

        All ranks make theirs at once. Takes 2 x capacity bytes of each GPU. `EngineError` where they are on different
        hosts, where a GPU cannot reach another's memory, and where they do not agree about the capacity.
        """
        self.rank, self.size = rank, size
        self._capacity = _aligned(capacity)
        self._circle = _Circle(group, rank, size, device)
        programs = self._circle.agreed("capacity", self._capacity)
        addresses = self._circle.shared(peers.window_bytes(self._capacity, size, programs))
        self._window = peers.Window(
            rank, size, _numbers(addresses, device), _numbers([0, 0], device), self._capacity, programs
        )

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes of a rank can be exchanged; for `scatter_sum`, those of all of x."""
        return nbytes <= self._capacity

    def add_sum(self, partial: Tensor, x: Tensor) -> None:
        """x += the sum of all ranks' `partial`, in place, rounded once: both [T, H], contiguous, of one dtype."""
        peers.add_sum(self._window, partial, x)

    def add_sum_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`add_sum`, and rms_norm of what x then is, by weight [H]: [T, H]."""
        return peers.add_sum_norm(self._window, partial, x, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side: [rows, size * width]; any dtype, contiguous."""
        return peers.gather(self._window, x)

    def gather_rows(self, x: Tensor) -> Tensor:
        """[n, width] of every rank, one below the other: [size * n, width]; any dtype, contiguous."""
        return peers.gather_rows(self._window, x)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's n rows of the sum over all ranks of x [size * n, width], contiguous: [n, width]."""
        return peers.scatter_sum(self._window, x)

    def close(self) -> None:
        """Give the memory back: all ranks at once, when nobody will exchange anything more."""
        self._circle.close()


class Ring:
    """What rank 0 puts, rank 1 takes, in the same order: two ranks on GPUs of one host, in processes of their own."""

    def __init__(self, group: Any, rank: int, device: torch.device, capacity: int, slots: int = 2) -> None:
        """`group`: over Gloo, of two ranks, this one being `rank`; `capacity`: the most bytes of a message.

        `slots`: how many messages may be on their way before rank 0's stream waits; they lie in rank 1's memory. Both
        ranks make theirs at once. `EngineError` as of `Peers`.
        """
        self._capacity = _aligned(capacity)
        self._circle = _Circle(group, rank, 2, device)
        programs = min(self._circle.agreed("capacity x slots", self._capacity * slots), RING_PROGRAMS)
        addresses = self._circle.shared(8 if rank == 0 else ring.ring_bytes(self._capacity, slots, programs))
        taken, slots_at = (_numbers([address], device) for address in addresses)
        self._ring = ring.Ring(taken, slots_at, _numbers([0, 0], device), self._capacity, slots, programs)

    def fits(self, nbytes: int) -> bool:
        """Whether a message of so many bytes can be put."""
        return nbytes <= self._capacity

    def put(self, x: Tensor) -> None:
        """Rank 0: on its way when the stream comes to what follows, which may overwrite x; contiguous, any dtype."""
        ring.put(self._ring, x)

    def take(self, like: Tensor) -> Tensor:
        """Rank 1: fill a contiguous tensor with the next message, of its shape and dtype."""
        return ring.take(self._ring, like)

    def close(self) -> None:
        """Give the memory back: both ranks at once, when nothing will be put any more."""
        self._circle.close()


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a rank tells the others of itself, first of all."""

    host: bytes
    device: bytes
    programs: int
    agreed: int

    PACKED: ClassVar[str] = "<16s16sqq"

    def packed(self) -> bytes:
        return struct.pack(self.PACKED, self.host, self.device, self.programs, self.agreed)


class _Circle:
    """Ranks that show one another memory, and what they have told and shown."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self._group, self._rank, self._size, self._device = group, rank, size, device
        self._addresses: list[int] = []
        self._seats = list(range(size))
        """Of each rank, its place in the group, which has an order of its own."""
        ranks = [told[0] for told in self._told(bytes([rank]))]
        self._seats = [ranks.index(one) for one in range(size)]

    def agreed(self, what: str, value: int) -> int:
        """Make sure that all can exchange and have the same `value`; how many programs every device runs at once."""
        device = self._device
        mine = _Facts(ipc.host(), ipc.identity(device), multiprocessors(device), value)
        found = [_Facts(*struct.unpack(_Facts.PACKED, told)) for told in self._told(mine.packed())]
        for rank, theirs in enumerate(found):
            if theirs.host != mine.host:
                raise EngineError(f"parallel: ranks {self._rank} and {rank} are on different hosts; exchange by NCCL")
            if theirs.agreed != value:
                raise EngineError(f"parallel: {what}={value} on rank {self._rank}, {theirs.agreed} on rank {rank}")
            ipc.check_reach(device, theirs.device)
        return min(theirs.programs for theirs in found)

    def shared(self, nbytes: int) -> list[int]:
        """Where this device addresses the memory of every rank, zeroed; of this one so many bytes."""
        mine = ipc.allocate(self._device, nbytes)
        for rank, handle in enumerate(self._told(ipc.show(self._device, mine))):
            self._addresses.append(mine if rank == self._rank else ipc.open_shown(self._device, handle))
        return self._addresses

    def close(self) -> None:
        for rank, address in enumerate(self._addresses):
            if rank != self._rank:
                ipc.close_shown(self._device, address)
        if self._addresses:
            dist.barrier(self._group)  # what others have open must not be freed
            ipc.free(self._device, self._addresses[self._rank])
            self._addresses.clear()

    def _told(self, message: bytes) -> list[bytes]:
        """What every rank says; all messages have one length. Nothing is pickled."""
        mine = torch.tensor(list(message), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        return [bytes(found[seat].tolist()) for seat in self._seats]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _numbers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
