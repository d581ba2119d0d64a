"""SiLU of the gate times the projection beside it, and rows of the embedding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import contiguous_rows, early, power_of_two, require

BLOCK = 1024
"""Elements a program computes: 16 bytes of bf16 a thread with 4 warps."""


def silu_mul(x: Tensor) -> Tensor:
    """As the reference, rounded once: x [T, 2 * W] holds gate and up side by side -> [T, W]."""
    require(x.dim() == 2 and x.shape[1] % 2 == 0, f"silu_mul: x is {list(x.shape)}, not [T, 2 * width]")
    contiguous_rows("silu_mul", x)
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    if out.numel():
        block = min(BLOCK, power_of_two(width))
        _silu_mul[(len(x), triton.cdiv(width, block))](
            x, out, x.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **early(x.device)
        )
    return out


@triton.jit
def _silu_mul(x, out, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    gate = tl.load(x + row * x_row + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, W] by tokens [T] (int32 or int64) -> [T, W]; an id that is no row gives zeros."""
    require(tokens.dim() == 1 and table.dim() == 2, "embedding: tokens must be [T], the table [V, W]")
    contiguous_rows("embedding", tokens, table)
    out = table.new_empty(len(tokens), table.shape[1])
    if out.numel():
        width = table.shape[1]
        block = min(BLOCK, power_of_two(width))
        _embedding[(len(tokens), triton.cdiv(width, block))](
            tokens, table, out, table.shape[0], table.stride(0), WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _embedding(tokens, table, out, vocabulary, table_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.where((token >= 0) & (token < vocabulary), WIDTH, 0)
    values = tl.load(table + token * table_row + column, mask=column < width, other=0.0)
    tl.store(out + row * WIDTH + column, values, mask=column < WIDTH)
