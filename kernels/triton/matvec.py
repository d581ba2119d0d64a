"""Products of one token: every weight is read once, straight into registers, by many small programs.

The norm before a projection, the residual after it and the gate of an MLP need nothing but what a program reads anyway,
so they cost no launch of their own. From two tokens on tensor cores are faster: see `skinny`.
"""
# ruff: noqa: C901 - a kernel is one function, and its branches are resolved by the compiler

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def matvec_kernel(
    x, weight, bias, norm, residual, out, outputs, inputs, eps, weight_row,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, LANE: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`OUTPUTS` columns of out [outputs] = x [inputs] @ weight [outputs (twice if gated), inputs].T."""
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # The last program's surplus columns read the last weight again: cheaper than a mask on every load.
    row = tl.minimum(column, outputs - 1).to(tl.int64)
    place = tl.arange(0, INPUTS)
    rows = weight + row[:, None] * weight_row
    above = weight + (row + outputs)[:, None] * weight_row
    sums = tl.zeros((OUTPUTS, INPUTS // LANE), tl.float32)
    squares = tl.zeros((INPUTS // LANE,), tl.float32)
    if GATED:
        up_sums = tl.zeros_like(sums)

    # One block ahead: weights are on their way while others are multiplied, and the first of them are before the
    # kernel that makes x has ended.
    next_weights = _weights(rows, place, inputs, EVEN)
    if GATED:
        next_ups = _weights(above, place, inputs, EVEN)
    if EARLY:
        gdc_wait()
    for start in range(0, inputs, INPUTS):
        k = start + place
        weights = next_weights.to(tl.float32)
        next_weights = _weights(rows, k + INPUTS, inputs, False)
        values = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if NORMED:
            squares += tl.sum(tl.reshape(values * values, (INPUTS // LANE, LANE)), 1)
            values *= tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32)
        sums += _lanes(weights * values[None, :], LANE)
        if GATED:
            ups = next_ups.to(tl.float32)
            next_ups = _weights(above, k + INPUTS, inputs, False)
            up_sums += _lanes(ups * values[None, :], LANE)
    if EARLY:
        # Not sooner: programs of the next kernel would crowd the multiprocessors that are ready first.
        gdc_launch_dependents()

    result = tl.sum(sums, 1)
    factor = 1.0
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result *= factor
    if BIASED:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1) * factor
        if BIASED:
            up += tl.load(bias + outputs + row).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    if ADDED:
        result += tl.load(residual + column, mask=column < outputs, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < outputs)


@triton.jit
def _weights(rows, k, inputs, EVEN: tl.constexpr):
    """A block of weights; nothing beyond the last."""
    if EVEN:
        return tl.load(rows + k[None, :])
    return tl.load(rows + k[None, :], mask=k[None, :] < inputs, other=0.0)


@triton.jit
def _lanes(products, LANE: tl.constexpr):
    """Neighbours along the last axis summed, which one thread holds: no other thread is asked inside the loop."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // LANE, LANE)), 2)
