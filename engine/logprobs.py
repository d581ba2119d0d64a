"""Log shares of tokens on their way from a device to an answer: one table, so that one copy brings all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.registry import Ops
from playground.core import Logprob


def share_table(logits: Tensor, ids: Tensor, top: int, ops: Ops) -> Tensor:
    """Of raw logits [S, V] and the tokens [S] that were picked: [S, 1 + 2 * top] in float64.

    The log share of the row's token, those of the `top` likeliest ones, and their ids, which float64 holds exactly.
    """
    mine, values, places = ops.logprobs(logits, ids, top)
    return torch.cat((mine[:, None].double(), values.double(), places.double()), 1)


def read_logprob(shares: Sequence[float], top: int) -> Logprob:
    """What a table's row says to somebody who asked for `top` alternatives, where others may have asked for more."""
    most = len(shares) // 2
    values, ids = shares[1 : 1 + top], shares[1 + most : 1 + most + top]
    return Logprob(shares[0], tuple(zip(map(int, ids), values, strict=True)))
