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
    values are made from, with the rotated part of the keys, which all heads share.
    """

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        option: str = "kv.blocks",
    ) -> None:
        """`option` is what an error tells to lower."""
        self.blocks = blocks
        self.block_size = block_size
        self.dtype = dtype
        # Zeros, not empty: what was never written must be finite for kernels that mask by weight.
        size = (shape.layers, blocks, block_size, *_token(shape))
        self.data = _allocate(size, dtype, device, option)
        self.layers: tuple[Tensor, ...] = tuple(self.data.unbind(0))
        """Each layer's blocks, [blocks, block_size, 2, kv_heads, head_dim] or [blocks, block_size, cached]."""


def copy_blocks(source: KvPool, target: KvPool, pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Copy blocks between pools in all layers; block i of the first list goes to block i of the second."""
    froms, tos = (torch.tensor(blocks, dtype=torch.int64) for blocks in pairs)
    moved = source.data.index_select(1, froms.to(source.data.device))
    target.data.index_copy_(1, tos.to(target.data.device), moved.to(target.data.device))


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return shape.layers * block_size * prod(_token(shape)) * dtype.itemsize


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
