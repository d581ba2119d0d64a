"""What the engine remembers of a sequence between steps: its tokens, its block table, where it ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.prompts import prompt_tokens
from kernels.reference import COUNT_MASK, IN_PROMPT
from playground.core import Request

Ints = NDArray[np.int64]


class BlockTable:
    """Block ids in order of position; grows at the end."""

    __slots__ = ("_ids", "_used")

    def __init__(self) -> None:
        self._ids: Ints = np.zeros(8, dtype=np.int64)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def ids(self) -> Ints:
        return self._ids[: self._used]

    def clear(self) -> None:
        self._used = 0

    def extend(self, blocks: tuple[int, ...]) -> None:
        end = self._used + len(blocks)
        if end > len(self._ids):
            self._ids = np.resize(self._ids, 2 * end)
        self._ids[self._used : end] = blocks
        self._used = end


class Sequence:
    """Tokens and blocks of one request.

    `known` counts the tokens that can be inputs: the prompt and all that were sampled, returned or not. `end` is the
    position of its last token once that was sampled; a token sampled beyond it came late and means nothing.
    """

    __slots__ = ("end", "epoch", "known", "request", "table", "tokens")

    def __init__(self, request: Request, vocabulary: int) -> None:
        self.request = request
        self.tokens: Ints = np.empty(request.prompt_length + request.max_tokens, dtype=np.int64)
        self.tokens[: request.prompt_length] = prompt_tokens(request, vocabulary)
        self.known = request.prompt_length
        self.table = BlockTable()
        self.epoch = 0
        self.end: int | None = None

    def place(self, epoch: int, blocks: tuple[int, ...]) -> None:
        """Blocks that a slice brings: appended, or the whole table if an epoch begins with them."""
        if epoch != self.epoch:
            self.table.clear()
            self.epoch = epoch
        self.table.extend(blocks)

    def accept(self, position: int, token: int, eos: tuple[int, ...]) -> bool:
        """Note the token sampled for a position; whether the sequence was still going on there.

        A position may be sampled again after a preemption: the new token replaces the old one.
        """
        self.tokens[position] = token
        self.known = position + 1
        if self.end is not None and position > self.end:
            return False
        self.end = position if self._ends(position, token, eos) else None
        return True

    def _ends(self, position: int, token: int, eos: tuple[int, ...]) -> bool:
        """Whether this is the last token: by number, or as the sampling says.

        Where a trace knows the output's length, only that counts.
        """
        request, sampled = self.request, position - self.request.prompt_length + 1
        if request.output_length is not None:
            return sampled >= request.output_length
        if sampled >= request.max_tokens or token in request.sampling.stop_token_ids:
            return True
        return token in eos and not request.sampling.ignore_eos


def token_counts(sequence: Sequence, end: int, vocabulary: int) -> NDArray[np.int16]:
    """How often each token is among the first `end`, as penalties want it (`SamplingRows.counts`): [vocabulary]."""
    prompt, output = np.split(sequence.tokens[:end], [sequence.request.prompt_length])
    counts = np.minimum(np.bincount(output, minlength=vocabulary), COUNT_MASK)
    counts[prompt] |= IN_PROMPT
    return counts.astype(np.int16)
