"""Paged batches whose pools hold NaN wherever a kernel has no business to read."""

from dataclasses import dataclass

import numpy
import pytest
import torch

from kernels import reference
from kernels.batch import PagedBatch


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call; `memory`: the pool's axes in the order they lie in memory."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    memory: tuple[int, ...] = (0, 1, 2, 3, 4)


def build(slices, shape, seed=0):
    """(queries [T, H, D], pool, batch) for slices of (start, length); the block table is a random permutation."""
    random = torch.Generator().manual_seed(seed)
    widths = [-(-(start + length) // shape.block_size) for start, length in slices]
    blocks = sum(widths) + 3
    pool = _pool(blocks, shape).fill_(float("nan"))
    order = torch.randperm(blocks, generator=random)
    tables = torch.full((len(slices), max(widths) + 1), int(order[-1]))  # a block of NaN
    used = 0
    for row, ((start, length), width) in enumerate(zip(slices, widths, strict=True)):
        tables[row, :width] = order[used : used + width]
        used += width
        places = torch.arange(start + length)
        kv = torch.randn(start + length, 2, shape.kv_heads, shape.head_dim, generator=random)
        pool[tables[row][places // shape.block_size], places % shape.block_size] = kv.to(shape.dtype)
    tokens = sum(length for _, length in slices)
    q = torch.randn(tokens, shape.heads, shape.head_dim, generator=random).to(shape.dtype)
    return q, pool, PagedBatch([s for s, _ in slices], [n for _, n in slices], tables, shape.block_size)


def _pool(blocks, shape):
    logical = (blocks, shape.block_size, 2, shape.kv_heads, shape.head_dim)
    stored = torch.empty([logical[axis] for axis in shape.memory], dtype=shape.dtype)
    return stored.permute([shape.memory.index(axis) for axis in range(5)])


def expected(q, pool, batch, scale, window=None):
    """The reference's answer; with a window, what a sequence cut to each query's window gives."""
    if window is None:
        return reference.Attention(batch)(q, pool, scale)
    parts, row = [], 0
    for index, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        positions = torch.arange(start + length)
        kv = pool[batch.tables[index][positions // batch.block_size], positions % batch.block_size].float()
        for position in range(start, start + length):
            keys, values = (
                kv[max(position + 1 - window, 0) : position + 1]
                .repeat_interleave(q.shape[1] // kv.shape[2], 2)
                .unbind(1)
            )
            scores = torch.einsum("hd,khd->hk", q[row].float(), keys) * scale
            parts.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
            row += 1
    return torch.stack(parts).to(q.dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def error(out, wanted):
    """Relative Frobenius error; NaN anywhere is NaN."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the relative error; bf16 also pays for the interpreter's truncation."""


def _release(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


def _broken():
    """Whether this interpreter fails on loops with bounds from memory."""
    import triton

    return _release(triton) < (3, 7) and _release(numpy) >= (2, 4)


def interpreted():
    """Marks of tests that need Triton's interpreter."""
    pytest.importorskip("triton")
    return pytest.mark.skipif(_broken(), reason="the interpreter of triton before 3.7 fails with numpy from 2.4 on")
