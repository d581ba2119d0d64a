"""KV pools: one tensor whose blocks the scheduler hands out by number. They know no sequence."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from engine.errors import EngineError
from playground.model import ModelShape


class KvPool:
    """Blocks of keys and values of all layers, on one device.

    Layout [layers, blocks, block_size, 2, kv_heads, head_dim]: a token's keys and values lie side by side, as the
    fused projection makes them, so one write stores both and one gather fetches both; a block of one layer is one
    contiguous piece. Of latent attention [layers, blocks, block_size, cached]: the compressed vector that keys and
    values are made from, with the rotated part of the keys, which all heads share. There is room for `spare` layers
    more than are in use, see `take`.
    """

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        option: str = "kv.blocks",
        spare: int = 0,
    ) -> None:
        """`option` is what an error tells to lower."""
        self.blocks = blocks
        self.block_size = block_size
        self.dtype = dtype
        # Zeros, not empty: what was never written must be finite for kernels that mask by weight.
        size = (shape.layers + spare, blocks, block_size, *_token(shape))
        self.data = _allocate(size, dtype, device, option)
        self._used, self._free = list(range(shape.layers)), list(range(shape.layers, size[0]))
        self._all = self.data.unbind(0)

    @property
    def layers(self) -> list[Tensor]:
        """Each layer's blocks, [blocks, block_size, 2, kv_heads, head_dim] or [blocks, block_size, cached]."""
        return [self._all[place] for place in self._used]

    def give(self, first: bool) -> int:
        """Use the first or the last layer no more; where in `data` it is, until another one is taken."""
        place = self._used.pop(0 if first else -1)
        self._free.append(place)
        return place

    def take(self, first: bool) -> int:
        """Use another layer, before the first one or after the last; where in `data` its blocks are to be."""
        place = self._free.pop()
        self._used.insert(0 if first else len(self._used), place)
        return place


def copy_blocks(source: KvPool, target: KvPool, pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Copy blocks between pools in all layers; block i of the first list goes to block i of the second."""
    froms, tos = (torch.tensor(blocks, dtype=torch.int64) for blocks in pairs)
    moved = source.data.index_select(1, froms.to(source.data.device))
    target.data.index_copy_(1, tos.to(target.data.device), moved.to(target.data.device))


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype, spare: int = 0) -> int:
    """Bytes of one block over all layers, and so many that may be taken in."""
    return (shape.layers + spare) * block_size * prod(_token(shape)) * dtype.itemsize


def _token(shape: ModelShape) -> tuple[int, ...]:
    """Axes of what one layer keeps of one token."""
    return (2, shape.kv_heads, shape.head_dim) if shape.latent is None else (shape.latent.cached,)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, option: str) -> Tensor:
    try:
        return torch.zeros(size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        gigabytes = torch.Size(size).numel() * dtype.itemsize / 1e9
        raise EngineError(
            f"{option}={size[1]}: no memory for a KV pool of {gigabytes:.1f} GB on {device}; ask for fewer blocks"
        ) from error
