"""What operations are told about a batch beside its tensors: pages, and how tokens are picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Span = tuple[int, int]
"""Where a slice starts in its sequence, and its length."""


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
        return [start + length for start, length in self.spans]

    @property
    def spans(self) -> list[Span]:
        return list(zip(self.starts, self.lengths, strict=True))


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A flat batch whose numbers lie on the device, in buffers that a captured graph may keep: nothing is read back.

    First come `decodes` rows of one token each, then the tokens of the prefills. All tensors are int32. Rows and
    slices with context 0 are padding: a decode row's output is zero, a prefill slice has no tokens.
    """

    decodes: int
    """Decode rows, padding included."""
    contexts: Tensor
    """Tokens that the last query of each decode row, then of each prefill slice, sees, itself included, [slices]."""
    tables: Tensor
    """Block ids, [slices, most blocks of any slice]; entries beyond a slice's last block are not read."""
    offsets: Tensor | None = None
    """First token of each prefill slice in the flat batch, and the end of the last, [prefills + 1]."""
    tokens: int = 0
    """At least the tokens of all prefill slices: bounds the grid, so a graph's bucket will do."""
    workspace: Any = None
    """Of the implementation; batches whose attention may run at the same time must not share one."""
    spans: Sequence[Span] = ()
    """The same numbers for whoever chooses by them on the host: of every decode row, then of every prefill slice.

    Padding is (0, 0), behind the real decode rows, and left out behind the last prefill. Empty where the host does not
    know them, as in a captured graph, which serves many batches.
    """

    def __post_init__(self) -> None:
        if self.offsets is not None and self.tokens < 1:
            raise ValueError(f"DeviceBatch: tokens={self.tokens} bounds the grid of {len(self.offsets) - 1} prefills")
        if self.spans and not self.decodes <= len(self.spans) <= len(self.contexts):
            raise ValueError(
                f"DeviceBatch: {len(self.spans)} spans for {self.decodes} decode rows in {len(self.contexts)} slices"
            )

    @property
    def prefills(self) -> Sequence[Span]:
        """As far as the host knows them."""
        return self.spans[self.decodes :]

    def rows(self) -> DeviceBatch:
        """The decode rows alone."""
        count = self.decodes
        return DeviceBatch(
            count, self.contexts[:count], self.tables[:count], workspace=self.workspace, spans=self.spans[:count]
        )

    def part(self, first: int, last: int) -> DeviceBatch:
        """The prefill slices first .. last, which the host knows, alone: their tokens stay where they are."""
        if self.offsets is None:
            raise ValueError("DeviceBatch: it has no prefills to take a part of")
        spans = self.prefills[first:last]
        begin, end = self.decodes + first, self.decodes + last
        # Copies, since kernels are compiled anew for pointers that are not aligned like those of whole tensors.
        contexts, tables, offsets = self.contexts[begin:end], self.tables[begin:end], self.offsets[first : last + 1]
        return DeviceBatch(
            0, contexts.clone(), tables.clone(), offsets.clone(), sum(length for _, length in spans), spans=spans
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the token of each of S rows of logits is picked, on the device. What is None, no row asks for."""

    temperature: Tensor
    """[S] float32; 0 takes the likeliest token."""
    seeds: Tensor
    """[S] int64: each request's."""
    positions: Tensor
    """[S] int64: of the token to come in its sequence."""
    top_k: Tensor | None = None
    """[S] int32; 0 keeps all."""
    top_p: Tensor | None = None
    """[S] float32; 1 keeps all."""
    min_p: Tensor | None = None
    """[S] float32: the least share kept, relative to the likeliest token's; 0 keeps all."""
    counts: Tensor | None = None
    """[slots, V] int16: how often each token was generated, plus `reference.IN_PROMPT` if it is in the prompt.

    With it come `slots` [S] (int32 or int64; below 0: no penalty) and three penalties [S] float32.
    """
    slots: Tensor | None = None
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None

    def __post_init__(self) -> None:
        penalties = (self.slots, self.repetition, self.presence, self.frequency)
        if any((part is None) != (self.counts is None) for part in penalties):
            raise ValueError("SamplingRows: counts, slots, repetition, presence and frequency come together")

    @property
    def filters(self) -> bool:
        """Whether some row may keep fewer tokens than there are."""
        return any(part is not None for part in (self.top_k, self.top_p, self.min_p))
