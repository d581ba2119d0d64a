"""Which experts a token goes through: softmax and the likeliest few, one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import contiguous_rows, early, power_of_two, require

MOST_EXPERTS = 1024
"""One program holds a token's logits in registers."""


def route(logits: Tensor, active: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference: logits [T, E] -> shares float32 and ids int32, [T, active]; ids are experts even where logits
    are NaN, as those of padding may be."""
    require(logits.dim() == 2, f"route: logits are {list(logits.shape)}, not [T, experts]")
    tokens, experts = logits.shape
    require(1 <= active <= experts <= MOST_EXPERTS, f"route: {active} of {experts} experts, at most {MOST_EXPERTS}")
    contiguous_rows("route", logits)
    shares = logits.new_empty(tokens, active, dtype=torch.float32)
    picks = logits.new_empty(tokens, active, dtype=torch.int32)
    if tokens:
        _route[(tokens,)](
            logits, shares, picks, logits.stride(0), experts, EXPERTS=power_of_two(experts), ACTIVE=active,
            PICKS=power_of_two(active), NORMALISED=normalise, num_warps=max(power_of_two(experts) // 256, 1),
            **early(logits.device),
        )  # fmt: skip
    return shares, picks


@triton.jit(do_not_specialize=["experts"])
def _route(
    logits, shares, picks, row, experts,
    EXPERTS: tl.constexpr, ACTIVE: tl.constexpr, PICKS: tl.constexpr, NORMALISED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    found = tl.load(logits + token * row + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    left = tl.where(found == found, found, float("-inf"))
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    place = tl.arange(0, PICKS)
    values = tl.zeros((PICKS,), tl.float32)
    ids = tl.zeros((PICKS,), tl.int32)
    for index in tl.static_range(ACTIVE):
        # The first of equals, which are experts and not the padding behind them, whatever the logits are.
        best, at = tl.max(left, 0, return_indices=True)
        values = tl.where(place == index, tl.exp(best - highest), values)
        ids = tl.where(place == index, at, ids)
        left = tl.where(expert == at, float("-inf"), left)
    if NORMALISED:
        total = tl.sum(values, 0)
    tl.store(shares + token * ACTIVE + place, values / total, mask=place < ACTIVE)
    tl.store(picks + token * ACTIVE + place, ids, mask=place < ACTIVE)
