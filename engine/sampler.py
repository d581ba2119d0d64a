"""From logits to tokens, each row as its request says, and what the request wants to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.logprobs import read_logprob, share_table
from engine.randomness import words
from engine.sequence import Sequence as Text
from engine.sequence import token_counts
from kernels.batch import SamplingRows
from kernels.registry import Ops
from playground.core import Logprob, Sampling


class Row(NamedTuple):
    """Whose token a row of logits is, and the position it will have."""

    sequence: Text
    position: int

    @property
    def sampling(self) -> Sampling:
        return self.sequence.request.sampling


class Picked(NamedTuple):
    """A token for each row; `logprobs` by number of the row, for those that asked."""

    ids: list[int]
    logprobs: Mapping[int, Logprob]


def pick(logits: Tensor, rows: Sequence[Row], ops: Ops) -> Picked:
    """One token for each row of logits [rows, vocabulary].

    Randomness is a function of the request's seed and the token's position, and of nothing else: neither batching nor
    preemption changes a token, and two requests with equal prompts and seeds get equal answers.
    """
    if not rows:
        return Picked([], {})
    ids = logits.argmax(-1)
    if other := [index for index, row in enumerate(rows) if row.sampling.temperature > 0 or row.sampling.penalises]:
        places = torch.tensor(other, device=logits.device)
        how = _sampling_rows([rows[index] for index in other], logits.shape[1], logits.device)
        ids[places] = ops.pick(logits[places], how)
    return Picked(ids.tolist(), _logprobs(logits, ids, rows, ops))


def _sampling_rows(rows: Sequence[Row], vocabulary: int, device: torch.device) -> SamplingRows:
    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row.sampling, name) for row in rows], dtype=dtype, device=device)

    how = SamplingRows(
        temperature=column("temperature"),
        seeds=torch.from_numpy(words([row.sampling.seed for row in rows]).view(np.int64)).to(device),
        positions=torch.tensor([row.position for row in rows], device=device),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
    )
    if not any(row.sampling.penalises for row in rows):
        return how
    # Counted anew for every token: next to a row of logits that is little, and right after whatever happened.
    counts = np.stack([token_counts(row.sequence, row.position, vocabulary) for row in rows])
    return replace(
        how,
        counts=torch.from_numpy(counts).to(device),
        slots=torch.arange(len(rows), device=device),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
    )


def _logprobs(logits: Tensor, ids: Tensor, rows: Sequence[Row], ops: Ops) -> dict[int, Logprob]:
    asked = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not asked:
        return {}
    places = torch.tensor([*asked], device=logits.device)
    table = share_table(logits[places], ids[places], max(asked.values()), ops).tolist()
    return {index: read_logprob(shares, top) for (index, top), shares in zip(asked.items(), table, strict=True)}
