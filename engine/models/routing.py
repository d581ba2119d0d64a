"""DeepSeek's way to pick experts: from the best groups only, by scores that may be corrected for the choice alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Grouped, Routing

TINY = 1e-20
"""Keeps shares finite where all scores are zero, as in DeepSeek-V3's own code."""


def pick_experts(
    logits: Tensor, routing: Routing, grouped: Grouped, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shares in float32 and ids in int32, [T, active], by logits [T, E] and a correction [E].

    Equals rank by id. Nothing is read back to the host: it may be part of a graph.
    """
    wide = logits.float()
    scores = wide.sigmoid() if grouped.sigmoid else wide.softmax(-1)
    wanted = scores if correction is None else scores + correction
    if grouped.taken < grouped.groups:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, grouped), float("-inf"))
    picks = wanted.sort(descending=True, stable=True)[1][:, : routing.active]
    shares = scores.gather(1, picks)
    if routing.normalise:
        shares = shares / (shares.sum(-1, keepdim=True) + TINY)
    return shares * grouped.scale, picks.int()


def _in_best_groups(wanted: Tensor, grouped: Grouped) -> Tensor:
    """Which experts are in a group that is taken, [T, E] bool."""
    parts = wanted.unflatten(1, (grouped.groups, -1))
    goodness = parts.topk(min(grouped.best, parts.shape[2]), -1)[0].sum(-1)
    order = goodness.sort(descending=True, stable=True)[1][:, : grouped.taken]
    taken = torch.zeros_like(goodness, dtype=torch.bool).scatter_(1, order, True)
    return taken[:, :, None].expand_as(parts).flatten(1)


class Router:
    """Logits in float32, whatever the model is in: near equals would change places by rounding."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.float()

    def __call__(self, y: Tensor) -> Tensor:
        """y [T, hidden] -> [T, E]."""
        return F.linear(y.float(), self._weight)
