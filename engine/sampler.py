"""From logits to tokens, each row as its request says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.randomness import uniform
from playground.core import Sampling

SampleOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Row(NamedTuple):
    """How the token of one row of logits is picked, and the position it will have in its sequence."""

    sampling: Sampling
    position: int


def pick(logits: Tensor, rows: Sequence[Row], sample: SampleOp) -> list[int]:
    """One token id for each row of logits [rows, vocabulary].

    Randomness is a function of the request's seed and the token's position, and of nothing else: neither batching nor
    preemption changes a token, and two requests with equal prompts and seeds get equal answers.
    """
    if not rows:
        return []
    ids = logits.argmax(-1)
    if drawn := [index for index, row in enumerate(rows) if row.sampling.temperature > 0]:
        places = torch.tensor(drawn, device=logits.device)
        ids[places] = _draw(logits[places], [rows[index] for index in drawn], sample)
    return ids.tolist()


def _draw(logits: Tensor, rows: Sequence[Row], sample: SampleOp) -> Tensor:
    vocabulary = logits.shape[1]
    samplings = [row.sampling for row in rows]
    temperature = [sampling.temperature for sampling in samplings]
    top_k = [sampling.top_k or vocabulary for sampling in samplings]
    top_p = [sampling.top_p for sampling in samplings]
    chance = uniform([sampling.seed for sampling in samplings], [row.position for row in rows])

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)

    return sample(logits, column(temperature), column(top_k), column(top_p), column(chance.tolist()))
