"""Products of some tens of tokens: bound by reading the weights, with tensor cores to keep up.

Weights are the tall operand, tokens the narrow one. The work is cut as decode attention's is, after Stream-K (Osama et
al. 2023): blocks of weights form one line, output tile after output tile, every program takes an equal share of it,
and the last program to finish a tile that was cut adds up its parts, always in the same order.

A norm before it or a gate after it are other kernels: scaling tokens on their way to the tensor cores costs more than
a launch that starts early (8 rows of Qwen3-8B on an H200: 6.2 ms a step instead of 4.9).
"""
# ruff: noqa: C901 - a kernel is one function, and its branches are resolved by the compiler

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def skinny_kernel(
    x, weight, bias, residual, out, partials, counters,
    tokens, outputs, inputs, x_row, weight_row, residual_row, out_row,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    ADDED: tl.constexpr, BIASED: tl.constexpr, UPCAST: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] @ weight [outputs, inputs].T + bias + residual, tokens <= TOKENS."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    steps = (inputs + INPUTS - 1) // INPUTS
    tiles = (outputs + OUTPUTS - 1) // OUTPUTS
    total = tiles * steps
    sharers = tl.minimum(tl.num_programs(0), total)
    # Where a few idle programs let all others have whole pieces or whole tiles, that is cheaper than equal shares.
    pieces = tl.minimum(tl.maximum(sharers // tiles, 1), steps)
    each = (tiles * pieces + sharers - 1) // sharers
    whole_sharers = tiles * pieces // each
    if whole_sharers * each == tiles * pieces and whole_sharers * 16 >= sharers * 15:
        sharers = whole_sharers
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
        sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for step in range(skipped, skipped + count):
            k = step * INPUTS + place
            known = token[:, None] < tokens
            if EVEN:
                weights = tl.load(rows + k[None, :])
            else:
                weights = tl.load(rows + k[None, :], mask=k[None, :] < inputs, other=0.0)
                known = known & (k[None, :] < inputs)
            values = tl.load(x + token[:, None] * x_row + k[None, :], mask=known, other=0.0)
            if UPCAST:
                values = values.to(tl.float32)
                weights = weights.to(tl.float32)
            sums = tl.dot(weights, tl.trans(values), sums, input_precision="tf32x3")

        whole = count == steps
        if not whole:
            first_sharer = _sharer(tile * steps, total, sharers)
            parts = _sharer(tile * steps + steps - 1, total, sharers) - first_sharer + 1
            within = inside[:, None] * TOKENS + token[None, :]
            # A program has at most two parts: of a tile that began before it, and of one that ends after it.
            mine_at = partials + (program * 2 + (skipped == 0).to(tl.int32)) * (OUTPUTS * TOKENS)
            tl.store(mine_at + within, sums)
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.debug_barrier()
                whole = True
                sums = tl.zeros((OUTPUTS, TOKENS), tl.float32)
                for start in range(0, parts, TOGETHER):
                    # Their loads are all on their way before the first is waited for.
                    for next_part in tl.static_range(TOGETHER):
                        part = start + next_part
                        at = partials + ((first_sharer + part) * 2 + (part == 0)) * (OUTPUTS * TOKENS)
                        # Not from the first-level cache: other multiprocessors wrote these.
                        there = tl.zeros_like(within) + part < parts
                        sums += tl.load(at + within, mask=there, other=0.0, cache_modifier=".cg")
                tl.store(counters + tile, 0)
        if whole:
            result = sums
            if BIASED:
                result += tl.load(bias + row).to(tl.float32)[:, None]
            real = (column[:, None] < outputs) & (token[None, :] < tokens)
            if ADDED:
                places = residual + token[None, :] * residual_row + column[:, None]
                result += tl.load(places, mask=real, other=0.0).to(tl.float32)
            tl.store(out + token[None, :] * out_row + column[:, None], result.to(out.dtype.element_ty), mask=real)
        begin += count


@triton.jit
def _sharer(step, total, sharers):
    """Whose share a step is in, of equal shares of `total`."""
    return (((step + 1).to(tl.int64) * sharers - 1) // total.to(tl.int64)).to(tl.int32)
