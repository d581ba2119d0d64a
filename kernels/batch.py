"""What paged attention is told about a flat batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Slices of several sequences, their tokens laid one after another: chunks of prompts and decodes alike.

    Slice i computes positions `starts[i] .. starts[i] + lengths[i]`; before it, its sequence has `starts[i]` tokens of
    KV. Token p of a sequence lies in block `tables[i, p // block_size]` at offset `p % block_size`; entries beyond
    the sequence's last block are valid blocks that hold nothing of it.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    tables: Tensor
    """Block ids, [slices, most blocks of any slice], int64."""
    block_size: int

    @property
    def contexts(self) -> list[int]:
        """Tokens that the last query of each slice sees, itself included."""
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
