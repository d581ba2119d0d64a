"""Pairs of a token and an expert that was picked for it: sorted by expert, and summed by token again."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import early, power_of_two

SORTED = 1024
"""Pairs that a sorting program reads at once."""

BLOCK = 1024
"""Elements of a token's sum that a program computes."""


def arranged(picks: Tensor, held: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs (token * active + place among its picks) by expert, [pairs], and where each expert's begin, [experts + 1].

    Both int32. Pairs of experts that are elsewhere are left out, so that as many places at the end stay unwritten.
    Within an expert they stay in order: nothing depends on which program is the faster.
    """
    pairs = picks.numel()
    order, offsets = picks.new_empty(pairs), picks.new_empty(experts + 1)
    block = min(SORTED, max(32, power_of_two(pairs)))
    _arrange[(experts,)](
        picks, held, order, offsets, pairs, len(held), BLOCK=block, num_warps=max(block // 256, 1),
        **early(picks.device),
    )  # fmt: skip
    return order, offsets


def summed(parts: Tensor, picks: Tensor, held: Tensor, residual: Tensor) -> Tensor:
    """residual [T, W] + the sum of each token's parts [T * active, W], of those experts that are here."""
    tokens, width = residual.shape
    block = min(BLOCK, power_of_two(width))
    _sum[(tokens, triton.cdiv(width, block))](
        parts, picks, held, residual, residual.stride(0), len(held), ACTIVE=picks.shape[1], WIDTH=width, BLOCK=block,
        num_warps=4, **early(parts.device),
    )  # fmt: skip
    return residual


@triton.jit(do_not_specialize=["pairs", "model_experts"])
def _arrange(picks, held, order, offsets, pairs, model_experts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One expert's pairs: how many others' come before them, then each to its place."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        place = _place(picks, held, start + inside, pairs, model_experts)
        earlier += ((place >= 0) & (place < expert)).to(tl.int32)
    begin = tl.sum(earlier, 0)
    tl.store(offsets + expert, begin)
    for start in range(0, pairs, BLOCK):
        pair = start + inside
        mine = (_place(picks, held, pair, pairs, model_experts) == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - mine, pair, mask=mine != 0)
        begin += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets + expert + 1, begin)


@triton.jit
def _place(picks, held, pair, pairs, model_experts):
    """Where the experts of some pairs are here; -1: nowhere, as are those that do not exist."""
    pick = tl.load(picks + pair, mask=pair < pairs, other=-1)
    return tl.load(held + pick, mask=(pick >= 0) & (pick < model_experts), other=-1)


@triton.jit(do_not_specialize=["model_experts"])
def _sum(
    parts, picks, held, residual, residual_row, model_experts,
    ACTIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    total = tl.load(residual + token * residual_row + column, mask=real, other=0.0).to(tl.float32)
    for index in tl.static_range(ACTIVE):
        pair = token * ACTIVE + index
        # What experts elsewhere would have added was never written.
        width = tl.where(_place(picks, held, pair, pair + 1, model_experts) >= 0, WIDTH, 0)
        total += tl.load(parts + pair * WIDTH + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(residual + token * residual_row + column, total.to(residual.dtype.element_ty), mask=real)
