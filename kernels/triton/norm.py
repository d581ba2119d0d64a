"""Root-mean-square norms, alone and with the residual added first: each tensor is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import contiguous_rows, early, power_of_two, require

MOST_WIDTH = 1 << 15
"""Elements of a row: one program holds them in registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, rounded once: x [T, ..., W] by weight [W], or [..., W] as far as it has axes."""
    rows, heads = _flat(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows.numel():
        width = x.shape[-1]
        _rms_norm[(len(rows),)](
            rows, weight, out, eps, rows.stride(0), heads, WIDTH=width, PADDED=power_of_two(width),
            num_warps=_warps(width), **early(x.device),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference, but x is overwritten with the sum: x and residual [T, W], weight [W]."""
    require(x.dim() == 2 and x.shape == residual.shape, "add_rms_norm: x and residual must be of one shape [T, W]")
    require(weight.shape == x.shape[1:], f"add_rms_norm: weight {list(weight.shape)} for rows of {x.shape[1]}")
    require(x.shape[1] <= MOST_WIDTH, f"add_rms_norm: rows of {x.shape[1]}, at most {MOST_WIDTH}")
    contiguous_rows("add_rms_norm", x, residual, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x):
        width = x.shape[1]
        _add_rms_norm[(len(x),)](
            x, residual, weight, out, eps, x.stride(0), residual.stride(0), WIDTH=width, PADDED=power_of_two(width),
            num_warps=_warps(width), **early(x.device),
        )  # fmt: skip
    return out, x


def _flat(x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """x as rows [N, W], and after how many rows the weights repeat."""
    require(weight.shape == x.shape[x.dim() - weight.dim() :], f"rms_norm: weight {list(weight.shape)} does not fit x")
    require(x.shape[-1] <= MOST_WIDTH, f"rms_norm: rows of {x.shape[-1]}, at most {MOST_WIDTH}")
    contiguous_rows("rms_norm", x, weight)
    return x.reshape(-1, x.shape[-1]), weight[..., 0].numel()


def _warps(width: int) -> int:
    """16 bytes of bf16 a thread and load, twice: enough in flight, few threads to reduce over."""
    return min(max(power_of_two(width) // 512, 1), 16)


@triton.jit
def _rms_norm(x, weight, out, eps, x_row, heads, WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    wide = tl.load(x + row * x_row + column, mask=real, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weights = tl.load(weight + (row % heads) * WIDTH + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (wide * factor * weights).to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, eps, x_row, residual_row, WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    real = column < WIDTH
    mine = tl.load(x + row * x_row + column, mask=real, other=0.0).to(tl.float32)
    other = tl.load(residual + row * residual_row + column, mask=real, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    # The norm is of what is stored, rounding included, as if these were two operations.
    total = (mine + other).to(x.dtype.element_ty)
    tl.store(x + row * x_row + column, total, mask=real)
    wide = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (wide * factor * weights).to(out.dtype.element_ty), mask=real)
