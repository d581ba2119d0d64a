"""From logits to tokens without asking the host: penalties, temperature, top-k, top-p, min-p, greedy, logprobs.

A row is read in parts by many programs. The kept tokens are found without sorting: top-k and top-p are thresholds on
the logits, narrowed by counting tokens and summing shares above three pivots a pass, over the integers whose order is
that of the floats; so a bfloat16 row needs at most 8 passes for each. A token is then drawn by inverting the running
sum of the kept shares in order of id, at a number that depends on the row's seed and position only (SplitMix64 of
Steele, Lea and Flood 2014, as `kernels.reference.uniform`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import SamplingRows
from kernels.reference import COUNT_MASK
from kernels.triton.launch import contiguous_rows, power_of_two, require

PART = 4096
"""Tokens of the vocabulary that one program reads."""

SEARCH = 4096
"""Tokens of the vocabulary that a row's only program reads at once."""

_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits that are zero in a float32 that came from this type."""


def pick(logits: Tensor, rows: SamplingRows | None = None) -> Tensor:
    """One token for each row of logits [S, V] -> ids [S] int64; without `rows` the likeliest (the first of equals).

    Launches: 2 if greedy or plain temperature, 4 with top-k, top-p or min-p, one more with penalties.
    """
    require(logits.dim() == 2 and logits.shape[1] > 0, "pick: logits must be [S, V]")
    contiguous_rows("pick", logits)
    if rows is not None and rows.counts is not None:
        logits = penalise(logits, rows)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(logits):
        return out
    parts = _Parts(logits, None if rows is None else rows.temperature)
    if rows is None:
        _first[(len(logits),)](parts.tops, parts.places, out, parts.count, PARTS=power_of_two(parts.count), num_warps=1)
        return out
    cut = _cut(logits, rows, parts) if rows.filters else None
    bound, kept = (parts.places, parts.places) if cut is None else cut
    size = min(PART, power_of_two(logits.shape[1]))
    _draw[(len(logits),)](
        logits, parts.tops, parts.places, parts.sums, parts.ties, bound, kept, rows.temperature, rows.seeds,
        rows.positions, out, logits.shape[1], logits.stride(0), parts.count,
        PARTS=power_of_two(parts.count), SIZE=size, CUT=cut is not None, UNUSED=_UNUSED_BITS[logits.dtype],
        num_warps=8,
    )  # fmt: skip
    return out


class _Parts:
    """What the parts of every row have told so far, [S, parts] each."""

    def __init__(self, logits: Tensor, temperature: Tensor | None) -> None:
        rows, vocabulary = logits.shape
        size = min(PART, power_of_two(vocabulary))
        self.count = triton.cdiv(vocabulary, size)
        self.tops = torch.empty(rows, self.count, dtype=torch.float32, device=logits.device)
        self.places = torch.empty(rows, self.count, dtype=torch.int32, device=logits.device)
        self.sums = torch.empty_like(self.tops)
        self.ties = torch.empty_like(self.places)
        _survey[(rows, self.count)](
            logits, self.tops if temperature is None else temperature, self.tops, self.places, self.sums,
            vocabulary, logits.stride(0), self.count, SIZE=size, SUMMED=temperature is not None, num_warps=4,
        )  # fmt: skip


def _cut(logits: Tensor, rows: SamplingRows, parts: _Parts) -> tuple[Tensor, Tensor]:
    """Each row's threshold as an ordered integer, and how many tokens equal to it are kept; parts' sums above it."""
    count, vocabulary = logits.shape
    bound = torch.empty(count, dtype=torch.int32, device=logits.device)
    kept = torch.empty_like(bound)
    unused = _UNUSED_BITS[logits.dtype]
    none = rows.temperature
    _threshold[(count,)](
        logits, parts.tops, rows.temperature, none if rows.top_k is None else rows.top_k,
        none if rows.top_p is None else rows.top_p, none if rows.min_p is None else rows.min_p, bound, kept,
        vocabulary, logits.stride(0), parts.count, PARTS=power_of_two(parts.count),
        SIZE=min(SEARCH, power_of_two(vocabulary)), UNUSED=unused, TOP_K=rows.top_k is not None,
        TOP_P=rows.top_p is not None, MIN_P=rows.min_p is not None, num_warps=16,
    )  # fmt: skip
    _sum_kept[(count, parts.count)](
        logits, rows.temperature, parts.tops, parts.sums, parts.ties, bound, vocabulary, logits.stride(0),
        parts.count, PARTS=power_of_two(parts.count), SIZE=min(PART, power_of_two(vocabulary)), UNUSED=unused,
        num_warps=4,
    )  # fmt: skip
    return bound, kept


def penalise(logits: Tensor, rows: SamplingRows) -> Tensor:
    """As the reference: logits [S, V] -> float32 [S, V]."""
    assert rows.counts is not None
    require(rows.counts.dtype == torch.int16, f"penalise: counts are {rows.counts.dtype}, not int16")
    require(rows.counts.shape[1] == logits.shape[1], "penalise: counts must have a column a token")
    contiguous_rows("penalise", logits, rows.counts)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    size = min(2048, power_of_two(logits.shape[1]))
    if len(logits):
        _penalise[(len(logits), triton.cdiv(logits.shape[1], size))](
            logits, rows.counts, rows.slots, rows.repetition, rows.presence, rows.frequency, out,
            logits.shape[1], logits.stride(0), rows.counts.stride(0), SIZE=size, MASK=COUNT_MASK, num_warps=4,
        )  # fmt: skip
    return out


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """One more of tokens[i] in row slots[i] of counts [slots, V] int16; a slot below 0 is padding. Slots differ."""
    require(counts.dtype == torch.int16, f"count_tokens: counts are {counts.dtype}, not int16")
    if len(tokens):
        _count_tokens[(len(tokens),)](counts, slots, tokens, counts.stride(0), MASK=COUNT_MASK, num_warps=1)


def logprobs(logits: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Of raw logits [S, V]: log shares of `ids` [S], and of each row's `top` likeliest tokens with their ids [S, top].

    The likeliest are torch's `topk`, which a graph can hold too.
    """
    ones = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    parts = _Parts(logits, ones)
    whole = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_sum[(len(logits),)](
            parts.tops, parts.sums, whole, parts.count, PARTS=power_of_two(parts.count), num_warps=1
        )
    mine = logits.gather(1, ids[:, None])[:, 0].float() - whole
    values, places = logits.topk(top, -1) if top else (logits[:, :0], ids[:, None][:, :0])
    return mine, values.float() - whole[:, None], places


# --- kernels


@triton.jit
def _survey(
    logits, temperature, tops, places, sums, vocabulary, row_stride, count, SIZE: tl.constexpr, SUMMED: tl.constexpr
):
    """A part's largest logit, its first place, and the sum of shares relative to it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    tl.store(tops + row * count + part, top)
    tl.store(places + row * count + part, tl.min(tl.where(x == top, token, vocabulary), 0))
    if SUMMED:
        # A greedy row has temperature 0 and uses no sum: any factor will do.
        heat = tl.load(temperature + row)
        factor = 1.4426950408889634 / tl.where(heat > 0, heat, 1.0)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + row * count + part, tl.sum(tl.exp2((x - base) * factor), 0))


@triton.jit
def _first(tops, places, out, count, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + row * count + part, mask=part < count, other=float("-inf"))
    place = tl.load(places + row * count + part, mask=part < count, other=2147483647)
    tl.store(out + row, tl.min(tl.where(top == tl.max(top, 0), place, 2147483647), 0).to(tl.int64))


@triton.jit
def _log_sum(tops, sums, out, count, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.load(tops + row * count + part, mask=part < count, other=float("-inf"))
    mass = tl.load(sums + row * count + part, mask=part < count, other=0.0)
    highest = tl.max(top, 0)
    total = tl.sum(mass * tl.exp2((top - highest) * 1.4426950408889634), 0)
    tl.store(out + row, highest + tl.log2(total) * 0.6931471805599453)


@triton.jit
def _order(x, UNUSED: tl.constexpr):
    """Integers in the order of floats that fill all but the lowest `UNUSED` bits of a float32."""
    # Zeros of both signs are equal as floats, and must be as integers.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> UNUSED
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> UNUSED))


@triton.jit
def _value(order, UNUSED: tl.constexpr):
    """The float of an ordered integer."""
    bits = order ^ ((order >> 31) & (0x7FFFFFFF >> UNUSED))
    return (bits << UNUSED).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, vocabulary, first, second, third, top, factor, SIZE: tl.constexpr, MASS: tl.constexpr):
    """Tokens above three pivots of a row, or the sums of their shares, as three scalars in float32."""
    one = tl.zeros((SIZE,), tl.float32)
    two = tl.zeros((SIZE,), tl.float32)
    three = tl.zeros((SIZE,), tl.float32)
    for start in range(0, vocabulary, SIZE):
        token = start + tl.arange(0, SIZE)
        x = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        share = 1.0  # counts are exact: a lane's are small, and all of them below 2^24
        if MASS:
            share = tl.exp2((x - top) * factor)
        one += tl.where(x > first, share, 0.0)
        two += tl.where(x > second, share, 0.0)
        three += tl.where(x > third, share, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _least(
    logits, vocabulary, low, high, limit, top, factor, SIZE: tl.constexpr, UNUSED: tl.constexpr, MASS: tl.constexpr
):
    """The least integer in low .. high above which there are fewer tokens, or less share, than `limit`; and how many.

    Above `high` there must be none. Bounds are 64 bits wide: their difference may need 33.
    """
    above = tl.full((), 0.0, tl.float32)
    while low < high:
        quarter = (high - low) // 4
        first = low + quarter
        second = low + (high - low) // 2
        third = second + quarter
        one, two, three = _above(
            logits, vocabulary, _value(first.to(tl.int32), UNUSED), _value(second.to(tl.int32), UNUSED),
            _value(third.to(tl.int32), UNUSED), top, factor, SIZE, MASS,
        )  # fmt: skip
        low = tl.where(one < limit, low, tl.where(two < limit, first, tl.where(three < limit, second, third)) + 1)
        high = tl.where(one < limit, first, tl.where(two < limit, second, tl.where(three < limit, third, high)))
        above = tl.where(one < limit, one, tl.where(two < limit, two, tl.where(three < limit, three, above)))
    # The integer of negative zero is no token's, and as a float it equals zero.
    return tl.where(low == -1, 0, low), above


@triton.jit
def _threshold(
    logits, tops, temperature, top_k, top_p, min_p, bound, kept, vocabulary, row_stride, count,
    PARTS: tl.constexpr, SIZE: tl.constexpr, UNUSED: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """A row keeps the tokens above `bound`, and of those equal to it the first `kept`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops + row * count + part, mask=part < count, other=float("-inf")), 0)
    heat = tl.load(temperature + row)
    factor = 1.4426950408889634 / tl.where(heat > 0, heat, 1.0)
    x = logits + row * row_stride
    highest = _order(top, UNUSED).to(tl.int64)
    # Below every float but -inf, whose share is zero.
    low = _order(tl.full((), float("-inf"), tl.float32), UNUSED).to(tl.int64)
    ties = tl.full((), 0, tl.int32)
    if TOP_K:
        most = tl.load(top_k + row)
        if (heat > 0) & (most > 0) & (most < vocabulary):
            low, above = _least(x, vocabulary, low, highest, most.to(tl.float32), top, factor, SIZE, UNUSED, False)
            ties = most - above.to(tl.int32)
    if MIN_P:
        share = tl.load(min_p + row)
        if (heat > 0) & (share > 0):
            least = top + tl.log2(share) / factor
            rounded = _order(least, UNUSED)
            # The largest integer whose float is below the least that is kept.
            below = tl.where(_value(rounded, UNUSED) >= least, rounded - 1, rounded).to(tl.int64)
            # Negative zero is not below zero as a float: take the one that is.
            below = tl.where(below == -1, -2, below)
            ties = tl.where(below >= low, 0, ties)
            low = tl.maximum(low, below)
    if TOP_P:
        share = tl.load(top_p + row)
        if (heat > 0) & (share < 1):
            here = _value(low.to(tl.int32), UNUSED)
            whole, _, _ = _above(x, vocabulary, here, here, here, top, factor, SIZE, True)
            whole += ties * tl.where(ties > 0, tl.exp2((here - top) * factor), 0.0)
            limit = share * whole
            least, above = _least(x, vocabulary, low, highest, limit, top, factor, SIZE, UNUSED, True)
            each = tl.exp2((_value(least.to(tl.int32), UNUSED) - top) * factor)
            needed = tl.maximum(tl.ceil((limit - above) / each), 1.0).to(tl.int32)
            ties = tl.where(least == low, tl.minimum(ties, needed), needed)
            low = least
    tl.store(bound + row, low.to(tl.int32))
    tl.store(kept + row, ties)


@triton.jit
def _sum_kept(
    logits, temperature, tops, sums, ties, bound, vocabulary, row_stride, count,
    PARTS: tl.constexpr, SIZE: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """A part's share above the row's bound, relative to the row's largest, and its tokens that equal the bound."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    every = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops + row * count + every, mask=every < count, other=float("-inf")), 0)
    heat = tl.load(temperature + row)
    factor = 1.4426950408889634 / tl.where(heat > 0, heat, 1.0)
    token = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    order = _order(x, UNUSED)
    limit = tl.load(bound + row)
    tl.store(sums + row * count + part, tl.sum(tl.where(order > limit, tl.exp2((x - top) * factor), 0.0), 0))
    tl.store(ties + row * count + part, tl.sum(((order == limit) & (token < vocabulary)).to(tl.int32), 0))


@triton.jit
def _mix(words):
    """A bijection of 64-bit words that looks like chance."""
    z = words + tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((1,), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((1,), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _draw(
    logits, tops, places, sums, ties, bound, kept, temperature, seeds, positions, out, vocabulary, row_stride, count,
    PARTS: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """The part, then the token of it, at which the running sum of kept shares passes the row's number."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < count
    top_of = tl.load(tops + row * count + part, mask=real, other=float("-inf"))
    top = tl.max(top_of, 0)
    heat = tl.load(temperature + row)
    if heat > 0:
        factor = 1.4426950408889634 / heat
        mass = tl.load(sums + row * count + part, mask=real, other=0.0)
        if CUT:
            limit = tl.load(bound + row)
            allowed = tl.load(kept + row)
            tied = tl.load(ties + row * count + part, mask=real, other=0)
            before = tl.cumsum(tied, 0) - tied
            mine = tl.minimum(tl.maximum(allowed - before, 0), tied)
            each = tl.where(allowed > 0, tl.exp2((_value(limit, UNUSED) - top) * factor), 0.0)
            mass += mine * each
        else:
            mass *= tl.exp2((top_of - top) * factor)

        one = tl.arange(0, 1)
        seed = tl.load(seeds + row + one).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row + one).to(tl.uint64, bitcast=True)
        # 24 bits are what a float32 below 1 holds.
        number = (_mix(_mix(seed) + position) >> 40).to(tl.float32) * 5.960464477539063e-08
        running = tl.cumsum(mass, 0)
        target = tl.sum(number, 0) * tl.sum(tl.where(part == PARTS - 1, running, 0.0), 0)
        # Rounding may put the target at the very end: then the last part that has a share.
        last = tl.max(tl.where(mass > 0, part, 0), 0)
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
        rest = target - tl.sum(tl.where(part == chosen, running - mass, 0.0), 0)

        token = chosen * SIZE + tl.arange(0, SIZE)
        x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        share = tl.exp2((x - top) * factor)
        if CUT:
            order = _order(x, UNUSED)
            same = ((order == limit) & (token < vocabulary)).to(tl.int32)
            quota = tl.sum(tl.where(part == chosen, mine, 0), 0)
            keeps = (order > limit) | ((same > 0) & (tl.cumsum(same, 0) <= quota))
            share = tl.where(keeps, share, 0.0)
        along = tl.cumsum(share, 0)
        place = tl.sum((along <= rest).to(tl.int32), 0)
        last_place = tl.max(tl.where(share > 0, tl.arange(0, SIZE), 0), 0)
        tl.store(out + row, (chosen * SIZE + tl.minimum(place, last_place)).to(tl.int64))
    else:
        firsts = tl.load(places + row * count + part, mask=real, other=2147483647)
        tl.store(out + row, tl.min(tl.where(top_of == top, firsts, 2147483647), 0).to(tl.int64))


@triton.jit
def _penalise(
    logits, counts, slots, repetition, presence, frequency, out, vocabulary, row_stride, count_stride,
    SIZE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = token < vocabulary
    x = tl.load(logits + row * row_stride + token, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    width = tl.where(slot >= 0, vocabulary, 0)
    seen = tl.load(counts + slot * count_stride + token, mask=token < width, other=0).to(tl.int32)
    repeated = tl.load(repetition + row)
    x = tl.where(seen != 0, tl.where(x > 0, x / repeated, x * repeated), x)
    often = seen & MASK
    x = x - often.to(tl.float32) * tl.load(frequency + row)
    x = tl.where(often > 0, x - tl.load(presence + row), x)
    tl.store(out + row * vocabulary + token, x, mask=real)


@triton.jit
def _count_tokens(counts, slots, tokens, count_stride, MASK: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        place = counts + slot * count_stride + tl.load(tokens + row)
        seen = tl.load(place).to(tl.int32)
        tl.store(place, tl.where((seen & MASK) < MASK, seen + 1, seen).to(tl.int16))
