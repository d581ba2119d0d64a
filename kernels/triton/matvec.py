"""Projections of one to four tokens: every weight is read once, straight into registers, by many small programs.

The norm before a projection, the residual after it and the gate of an MLP need nothing but what a program reads anyway,
so they cost no launch of their own. Above four tokens arithmetic would hold the memory back: see `skinny`.
"""
# ruff: noqa: C901 - a kernel is one function, and its branches are resolved by the compiler

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_TOKENS = 4


@triton.jit
def matvec_kernel(
    x, weight, bias, norm, residual, out, tokens, outputs, inputs, eps, x_row, weight_row, residual_row, out_row,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, LANE: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`OUTPUTS` columns of out [tokens, outputs] = x [tokens, inputs] @ weight [outputs (twice if gated), inputs].T."""
    if EARLY:
        gdc_launch_dependents()
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # The last program's surplus columns read the last weight again: cheaper than a mask on every load.
    row = tl.minimum(column, outputs - 1).to(tl.int64)
    place = tl.arange(0, INPUTS)
    rows = weight + row[:, None] * weight_row
    above = weight + (row + outputs)[:, None] * weight_row

    first = tl.zeros((OUTPUTS, INPUTS // LANE), tl.float32)
    squares = tl.zeros((INPUTS // LANE,), tl.float32)
    if GATED:
        first_up = tl.zeros_like(first)
    if TOKENS > 1:
        second = tl.zeros_like(first)
        second_squares = tl.zeros_like(squares)
        if GATED:
            second_up = tl.zeros_like(first)
    if TOKENS > 2:
        third = tl.zeros_like(first)
        fourth = tl.zeros_like(first)
        third_squares = tl.zeros_like(squares)
        fourth_squares = tl.zeros_like(squares)
        if GATED:
            third_up = tl.zeros_like(first)
            fourth_up = tl.zeros_like(first)

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
        if GATED:
            ups = next_ups.to(tl.float32)
            next_ups = _weights(above, k + INPUTS, inputs, False)
        values, square = _values(x, norm, k, inputs, LANE, NORMED)
        squares += square
        first += _lanes(weights * values[None, :], LANE)
        if GATED:
            first_up += _lanes(ups * values[None, :], LANE)
        if TOKENS > 1:
            values, square = _values(x + x_row * tl.minimum(tokens - 1, 1), norm, k, inputs, LANE, NORMED)
            second_squares += square
            second += _lanes(weights * values[None, :], LANE)
            if GATED:
                second_up += _lanes(ups * values[None, :], LANE)
        if TOKENS > 2:
            values, square = _values(x + x_row * tl.minimum(tokens - 1, 2), norm, k, inputs, LANE, NORMED)
            third_squares += square
            third += _lanes(weights * values[None, :], LANE)
            if GATED:
                third_up += _lanes(ups * values[None, :], LANE)
            values, square = _values(x + x_row * tl.minimum(tokens - 1, 3), norm, k, inputs, LANE, NORMED)
            fourth_squares += square
            fourth += _lanes(weights * values[None, :], LANE)
            if GATED:
                fourth_up += _lanes(ups * values[None, :], LANE)

    if not GATED:
        first_up = first
    _finish(0, first, first_up, squares, bias, residual, out, column, row, tokens, outputs, inputs, eps, residual_row,
            out_row, NORMED, GATED, ADDED, BIASED)  # fmt: skip
    if TOKENS > 1:
        if not GATED:
            second_up = second
        _finish(1, second, second_up, second_squares, bias, residual, out, column, row, tokens, outputs, inputs, eps,
                residual_row, out_row, NORMED, GATED, ADDED, BIASED)  # fmt: skip
    if TOKENS > 2:
        if not GATED:
            third_up = third
            fourth_up = fourth
        _finish(2, third, third_up, third_squares, bias, residual, out, column, row, tokens, outputs, inputs, eps,
                residual_row, out_row, NORMED, GATED, ADDED, BIASED)  # fmt: skip
        _finish(3, fourth, fourth_up, fourth_squares, bias, residual, out, column, row, tokens, outputs, inputs, eps,
                residual_row, out_row, NORMED, GATED, ADDED, BIASED)  # fmt: skip


@triton.jit
def _weights(rows, k, inputs, EVEN: tl.constexpr):
    """A block of weights; nothing beyond the last."""
    if EVEN:
        return tl.load(rows + k[None, :])
    return tl.load(rows + k[None, :], mask=k[None, :] < inputs, other=0.0)


@triton.jit
def _values(x, norm, k, inputs, LANE: tl.constexpr, NORMED: tl.constexpr):
    """One token's inputs, times the norm's weights, and the sums of squares of a thread's own."""
    values = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
    squares = tl.sum(tl.reshape(values * values, (k.shape[0] // LANE, LANE)), 1)
    if NORMED:
        values *= tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32)
    return values, squares


@triton.jit
def _lanes(products, LANE: tl.constexpr):
    """Neighbours along the last axis summed, which one thread holds: no other thread is asked inside the loop."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // LANE, LANE)), 2)


@triton.jit
def _finish(
    token: tl.constexpr, sums, ups, squares, bias, residual, out, column, row, tokens, outputs, inputs, eps,
    residual_row, out_row, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    result = tl.sum(sums, 1)
    factor = 1.0
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result *= factor
    if BIASED:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1) * factor
        if BIASED:
            up += tl.load(bias + outputs + row).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    limit = tl.where(token < tokens, outputs, 0)
    if ADDED:
        result += tl.load(residual + token * residual_row + column, mask=column < limit, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + column, result.to(out.dtype.element_ty), mask=column < limit)
