"""What the device remembers of sequences: their tokens, block tables and sampling parameters, in numbered slots.

A step's sampled tokens are stored here by the device itself, so that the next step may be launched before the host has
read them. It knows no request and no step.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntFlag
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.memory import enough_memory
from kernels.batch import SamplingRows
from playground.core import Sampling, Spec

Words = NDArray[np.int64]

MASK = (1 << 64) - 1


class Picking(IntFlag):
    """How tokens are picked, and what is told of them: all that some row of a batch asks for."""

    GREEDY = 0
    DRAWN = 1
    MIN_P = 2
    PENALTIES = 4
    LOGPROBS = 8

    @property
    def rare(self) -> bool:
        """Whether it is more than being greedy or drawing by temperature, top-k and top-p."""
        return self > Picking.DRAWN


def picking(sampling: Sampling) -> Picking:
    """What one request asks for."""
    asked = {
        Picking.DRAWN: sampling.temperature > 0,
        Picking.MIN_P: sampling.temperature > 0 and sampling.min_p > 0,
        Picking.PENALTIES: sampling.penalises,
        Picking.LOGPROBS: sampling.logprobs is not None,
    }
    return Picking(sum(flag for flag, holds in asked.items() if holds))


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Options of `Sampling` that a slot keeps as float32."""


class SlotState:
    """Rows of `slots` sequences, and one more, `scratch`, for rows of a batch that belong to nobody.

    All of it is one flat tensor of 32-bit words, so that whatever changed is brought up to date by one scatter; but for
    `counts`, which are as many as the vocabulary has tokens and made when somebody first asks for penalties.
    """

    def __init__(self, spec: Spec, slots: int, device: torch.device) -> None:
        self.scratch = slots
        self.block_size = spec.block_size
        rows = slots + 1
        # One token beyond the longest sequence: the last one sampled needs no KV.
        self.length = spec.max_length + 1
        self.width = spec.blocks_for(spec.max_length)
        sizes = [rows * self.length, rows * self.width, rows, 2 * rows, *[rows] * len(_FLOATS)]
        starts = [0, *accumulate(-(-size // 32) * 32 for size in sizes)]
        self._words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        parts = [self._words[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._starts = starts
        self._tokens, tables, self._top_k, seeds, *floats = parts
        self.tables = tables.view(rows, self.width)
        """Block ids, [slots + 1, most blocks of a sequence], int32."""
        self._flat_tables = tables
        self._seeds = seeds.view(torch.int64)
        self._floats = {name: part.view(torch.float32) for name, part in zip(_FLOATS, floats, strict=True)}
        for name, part in self._floats.items():
            part.fill_(getattr(Sampling(), name))  # what padding has
        self.counts: Tensor | None = None
        """How often each token was before, [slots + 1, vocabulary] int16, see `SamplingRows.counts`."""

    @property
    def bytes(self) -> int:
        return self._words.nbytes + (0 if self.counts is None else self.counts.nbytes)

    # --- places of words, for the host

    def token_place(self, slot: int, position: int) -> int:
        return slot * self.length + position

    def table_place(self, slot: int, index: int) -> int:
        return self._starts[1] + slot * self.width + index

    def sampling_words(self, slot: int, sampling: Sampling) -> tuple[Words, Words]:
        """Places and words of a slot's sampling parameters."""
        _, _, top_ks, seeds, *floats, _ = self._starts
        places = (top_ks + slot, seeds + 2 * slot, seeds + 2 * slot + 1, *(start + slot for start in floats))
        values = np.array([getattr(sampling, name) for name in _FLOATS], dtype=np.float32).view(np.int32)
        seed = np.array([sampling.seed & MASK], dtype=np.uint64).view(np.int32)
        return np.array(places), np.array([sampling.top_k, *seed, *values], dtype=np.int64)

    # --- on the device

    def write(self, places: Tensor, words: Tensor) -> None:
        """Store words [N] int64, of which the low 32 bits count, at different places [N] int64."""
        self._words.index_copy_(0, places, words.int())

    def tokens(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Token ids by slot and position, each [T] int64 -> [T] int32."""
        return self._tokens.index_select(0, slots * self.length + positions)

    def store(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Token ids [T] at slots and positions; of several for one place any is kept."""
        self._tokens.index_copy_(0, slots * self.length + positions, tokens.int())

    def kv_places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where in the KV pool a token lies: block * block_size + offset, [T] int64."""
        blocks = self._flat_tables.index_select(0, slots * self.width + positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def sampling(self, slots: Tensor, positions: Tensor, picking: Picking) -> SamplingRows:
        """How the tokens that come at `positions` of the slots' sequences are picked."""

        def column(part: Tensor) -> Tensor:
            return part.index_select(0, slots)

        floats = self._floats
        rows = SamplingRows(column(floats["temperature"]), column(self._seeds), positions)
        if Picking.DRAWN in picking:
            rows = replace(rows, top_k=column(self._top_k), top_p=column(floats["top_p"]))
        if Picking.MIN_P in picking:
            rows = replace(rows, min_p=column(floats["min_p"]))
        if Picking.PENALTIES not in picking:
            return rows
        return replace(
            rows,
            counts=self.counts,
            slots=self.counted(slots),
            repetition=column(floats["repetition_penalty"]),
            presence=column(floats["presence_penalty"]),
            frequency=column(floats["frequency_penalty"]),
        )

    def counted(self, slots: Tensor) -> Tensor:
        """The slots, and -1 for padding: of rows that share the scratch slot none is counted."""
        return slots.masked_fill(slots == self.scratch, -1)

    def make_counts(self, vocabulary: int) -> None:
        """Room for counts of tokens, unless there is."""
        if self.counts is not None:
            return
        size = (self.scratch + 1, vocabulary)
        with enough_memory(
            f"penalties need {2 * size[0] * size[1] / 1e9:.2f} GB to count {vocabulary} tokens in {size[0]} slots, "
            "which are not free; lower gpu_memory_utilization or limits.max_seqs, or send no repetition_penalty, "
            "presence_penalty and frequency_penalty"
        ):
            self.counts = torch.zeros(size, dtype=torch.int16, device=self._words.device)

    def write_counts(self, slots: Tensor, places: Tensor, values: Tensor) -> None:
        """Begin rows of counts anew: zero but for `values` [N] at `places` [N], slot * vocabulary + token."""
        assert self.counts is not None
        self.counts.index_fill_(0, slots, 0)
        self.counts.view(-1).index_copy_(0, places, values.short())
