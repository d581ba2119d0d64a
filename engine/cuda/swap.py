"""KV blocks between the device's pool and page-locked memory of the host, in few large transfers.

A block of all layers lies in one piece on the host; on the device it is gathered into a staging buffer first, or
scattered from it. It knows no sequence; that nobody touches the blocks meanwhile is the scheduler's promise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kv import KvPool

STAGING_BYTES = 128 << 20
"""Enough for transfers that reach the link's bandwidth, little beside a pool."""


class Swap:
    """A host pool of `blocks` blocks and the way there and back. Call it where copies are queued."""

    def __init__(self, pool: KvPool, blocks: int, pinned: bool) -> None:
        layers, device_blocks = pool.data.shape[:2]
        flat = pool.data.view(layers * device_blocks, -1)
        self._flat = _wide(flat)
        """Every layer of every block, [layers * blocks, words]: a row in one piece."""
        self._bases = torch.arange(layers, device=flat.device) * device_blocks
        self._host = _pinned((blocks, layers, self._flat.shape[1]), self._flat.dtype, pinned)
        piece = layers * self._flat.shape[1] * self._flat.dtype.itemsize
        self._together = max(1, STAGING_BYTES // piece)
        self._staging = self._flat.new_empty((self._together, layers, self._flat.shape[1]))

    @property
    def host_bytes(self) -> int:
        return self._host.nbytes

    @property
    def layers(self) -> Tensor:
        """What the host holds, [layers, blocks, words], layers in the order of the device's pool."""
        return self._host.transpose(0, 1)

    def out(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Device blocks to host blocks."""
        for first, staged, rows in self._portions(source):
            torch.index_select(self._flat, 0, rows, out=staged.view(len(rows), -1))
            for at, there, count in _runs(target[first : first + len(staged)]):
                self._host[there : there + count].copy_(staged[at : at + count], non_blocking=True)

    def back(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Host blocks to device blocks."""
        for first, staged, rows in self._portions(target):
            for at, here, count in _runs(source[first : first + len(staged)]):
                staged[at : at + count].copy_(self._host[here : here + count], non_blocking=True)
            self._flat.index_copy_(0, rows, staged.view(len(rows), -1))

    def _portions(self, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index of the first block, a part of the staging buffer, its rows in the pool), portion by portion."""
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._host.is_pinned())
        ids = ids.to(self._flat.device, non_blocking=True)
        for first in range(0, len(blocks), self._together):
            part = ids[first : first + self._together]
            yield first, self._staging[: len(part)], (part[:, None] + self._bases).flatten()


def _wide(flat: Tensor) -> Tensor:
    """The same bytes in elements of 8 bytes, where rows have so many: fewer to move."""
    return flat.view(torch.int64) if flat.shape[1] * flat.dtype.itemsize % 8 == 0 else flat


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the list, first block, how many) of each run of consecutive blocks."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
            yield first, blocks[first], place - first
            first = place


def _pinned(size: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    try:
        return torch.empty(size, dtype=dtype, pin_memory=pinned)
    except RuntimeError as error:
        gigabytes = torch.Size(size).numel() * dtype.itemsize / 1e9
        raise EngineError(
            f"kv.host_blocks={size[0]}: no {gigabytes:.1f} GB of page-locked memory on the host; ask for fewer blocks"
        ) from error
