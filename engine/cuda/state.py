"""What the device remembers of sequences: their tokens, block tables and sampling parameters, in numbered slots.

A step's sampled tokens are stored here by the device itself, so that the next step may be launched before the host has
read them. It knows no request and no step.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import SamplingRows
from playground.core import Sampling, Spec

Words = NDArray[np.int64]

MASK = (1 << 64) - 1


class SlotState:
    """Rows of `slots` sequences, and one more, `scratch`, for rows of a batch that belong to nobody.

    All of it is one flat tensor of 32-bit words, so that whatever changed is brought up to date by one scatter.
    """

    def __init__(self, spec: Spec, slots: int, device: torch.device) -> None:
        self.scratch = slots
        self.block_size = spec.block_size
        rows = slots + 1
        # One token beyond the longest sequence: the last one sampled needs no KV.
        self.length = spec.max_length + 1
        self.width = spec.blocks_for(spec.max_length)
        sizes = [rows * self.length, rows * self.width, rows, rows, rows, 2 * rows]
        starts = [0, *accumulate(-(-size // 32) * 32 for size in sizes)]
        self._words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        parts = [self._words[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._starts = starts
        self._tokens, tables, heat, self._top_k, top_p, seeds = parts
        self.tables = tables.view(rows, self.width)
        """Block ids, [slots + 1, most blocks of a sequence], int32."""
        self._flat_tables = tables
        self._heat, self._top_p, self._seeds = (
            heat.view(torch.float32),
            top_p.view(torch.float32),
            seeds.view(torch.int64),
        )

    @property
    def bytes(self) -> int:
        return self._words.nbytes

    # --- places of words, for the host

    def token_place(self, slot: int, position: int) -> int:
        return slot * self.length + position

    def table_place(self, slot: int, index: int) -> int:
        return self._starts[1] + slot * self.width + index

    def sampling_words(self, slot: int, sampling: Sampling) -> tuple[Words, Words]:
        """Places and words of a slot's sampling parameters."""
        _, _, heats, top_ks, top_ps, seeds, _ = self._starts
        places = (heats + slot, top_ks + slot, top_ps + slot, seeds + 2 * slot, seeds + 2 * slot + 1)
        floats = np.array([sampling.temperature, sampling.top_p], dtype=np.float32).view(np.int32)
        seed = np.array([sampling.seed & MASK], dtype=np.uint64).view(np.int32)
        return np.array(places), np.array([floats[0], sampling.top_k, floats[1], *seed], dtype=np.int64)

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

    def sampling(self, slots: Tensor, positions: Tensor) -> SamplingRows:
        """How the tokens that come at `positions` of the slots' sequences are picked."""
        heat, top_k, top_p, seeds = (
            part.index_select(0, slots) for part in (self._heat, self._top_k, self._top_p, self._seeds)
        )
        return SamplingRows(heat, seeds, positions, top_k, top_p)
