"""Projections of some tens of tokens: bound by reading the weights, with tensor cores to keep up.

Weights are the tall operand, tokens the narrow one. The work is cut as decode attention's is, after Stream-K (Osama et
al. 2023): blocks of weights form one line, output tile after output tile, every program takes an equal share of it,
and the last program to finish a tile that was cut adds up its parts, always in the same order.
"""
# ruff: noqa: C901 - a kernel is one function, and its branches are resolved by the compiler

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def skinny_kernel(
    x, weight, bias, norm, residual, out, partials, counters,
    tokens, outputs, inputs, eps, x_row, weight_row, residual_row, out_row,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr, UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] @ weight [outputs (twice if gated), inputs].T, tokens <= TOKENS."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    steps = (inputs + INPUTS - 1) // INPUTS
    total = (outputs + OUTPUTS - 1) // OUTPUTS * steps
    sharers = tl.minimum(tl.num_programs(0), total)
    mine = tl.minimum(program, sharers).to(tl.int64)
    begin = (mine * total // sharers).to(tl.int32)
    end = (tl.minimum(mine + 1, sharers) * total // sharers).to(tl.int32)

    token = tl.arange(0, TOKENS)
    place = tl.arange(0, INPUTS)
    inside = tl.arange(0, OUTPUTS)
    while begin < end:
        tile = begin // steps
        skipped = begin - tile * steps
        count = tl.minimum(end - begin, steps - skipped)
        column = tile * OUTPUTS + inside
        # The last tile's surplus columns read the last weight again: cheaper than a mask on every load.
        row = tl.minimum(column, outputs - 1).to(tl.int64)
        rows = weight + row[:, None] * weight_row
        above = weight + (row + outputs)[:, None] * weight_row
        sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        if GATED:
            ups = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for step in range(skipped, skipped + count):
            k = step * INPUTS + place
            if EVEN:
                weights = tl.load(rows + k[None, :])
                values = tl.load(x + token[:, None] * x_row + k[None, :], mask=token[:, None] < tokens, other=0.0)
            else:
                known = k[None, :] < inputs
                weights = tl.load(rows + k[None, :], mask=known, other=0.0)
                values = tl.load(
                    x + token[:, None] * x_row + k[None, :], mask=(token[:, None] < tokens) & known, other=0.0
                )
            if NORMED:
                wide = values.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                by = tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32)
                values = (wide * by[None, :]).to(x.dtype.element_ty)
            if UPCAST:
                values = values.to(tl.float32)
                weights = weights.to(tl.float32)
            sums = tl.dot(weights, tl.trans(values), sums, input_precision="tf32x3")
            if GATED:
                if EVEN:
                    more = tl.load(above + k[None, :])
                else:
                    more = tl.load(above + k[None, :], mask=k[None, :] < inputs, other=0.0)
                if UPCAST:
                    more = more.to(tl.float32)
                ups = tl.dot(more, tl.trans(values), ups, input_precision="tf32x3")

        whole = count == steps
        if not whole:
            wide_total = total.to(tl.int64)
            item = tile * steps
            first_sharer = (((item + 1).to(tl.int64) * sharers - 1) // wide_total).to(tl.int32)
            last_sharer = (((item + steps).to(tl.int64) * sharers - 1) // wide_total).to(tl.int32)
            parts = last_sharer - first_sharer + 1
            # A program has at most two parts: of a tile that began before it, and of one that ends after it.
            size = (2 if GATED else 1) * OUTPUTS * TOKENS + TOKENS
            within = inside[:, None] * TOKENS + token[None, :]
            mine_at = partials + (program * 2 + (skipped == 0).to(tl.int32)) * size
            tl.store(mine_at + token, squares)
            tl.store(mine_at + TOKENS + within, sums)
            if GATED:
                tl.store(mine_at + TOKENS + OUTPUTS * TOKENS + within, ups)
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.debug_barrier()
                whole = True
                squares = tl.zeros((TOKENS,), tl.float32)
                sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
                if GATED:
                    ups = tl.zeros((OUTPUTS, TOKENS), tl.float32)
                for part in range(parts):
                    # Not from the first-level cache: other multiprocessors wrote these.
                    at = partials + ((first_sharer + part) * 2 + (part == 0)) * size
                    squares += tl.load(at + token, cache_modifier=".cg")
                    sums += tl.load(at + TOKENS + within, cache_modifier=".cg")
                    if GATED:
                        ups += tl.load(at + TOKENS + OUTPUTS * TOKENS + within, cache_modifier=".cg")
                tl.store(counters + tile, 0)
        if whole:
            result = sums
            if NORMED:
                factor = tl.rsqrt(squares / inputs + eps)
                result = sums * factor[None, :]
            if BIASED:
                result += tl.load(bias + row).to(tl.float32)[:, None]
            if GATED:
                up = ups
                if NORMED:
                    up = ups * factor[None, :]
                if BIASED:
                    up += tl.load(bias + outputs + row).to(tl.float32)[:, None]
                result = result * tl.sigmoid(result) * up
            real = (column[:, None] < outputs) & (token[None, :] < tokens)
            if ADDED:
                places = residual + token[None, :] * residual_row + column[:, None]
                result += tl.load(places, mask=real, other=0.0).to(tl.float32)
            tl.store(out + token[None, :] * out_row + column[:, None], result.to(out.dtype.element_ty), mask=real)
        begin += count
