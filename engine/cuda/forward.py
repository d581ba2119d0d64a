"""From numbers on the device to sampled tokens on the device: one pass of the model, with nothing read back.

The same for a captured graph, whose batches are padded to a shape in a list, and for a step of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.residents import Resident, Sampled, slots_of
from engine.cuda.state import Picking, SlotState, Words
from engine.kv import KvPool
from engine.logprobs import share_table
from engine.models.decoder import Decoder, Inputs
from kernels.batch import DeviceBatch, Span
from playground.core import Slice

ROWS = 8
"""Decode rows are a multiple of this beside prefills: what follows them in memory is aligned then."""

SLICES = (16, 64, 256)
"""Prefill slices of a step are padded to one of these: kernels are compiled for each number in a bucket."""


class Shape(NamedTuple):
    """How many of everything a batch has, padding included: decode rows come first, then the tokens of prefills."""

    decodes: int
    tokens: int = 0
    """Of all prefills."""
    slices: int = 0
    """Prefills."""
    rows: int | None = None
    """Tokens whose successor is wanted; None: there is nothing but decodes, and all of them sample."""

    @property
    def sizes(self) -> list[int]:
        """Of the parts of a packed batch, see `pack`."""
        if self.rows is None:
            return [self.decodes] * 2
        tokens, slices = self.decodes + self.tokens, self.decodes + self.slices
        return [tokens, tokens, slices, slices, self.slices and self.slices + 1, self.rows]

    @property
    def wanted(self) -> int:
        """Rows of logits."""
        return self.decodes if self.rows is None else self.rows


def spans(parts: Sequence[Slice], shape: Shape) -> list[Span]:
    """Start and length of the slices in the order of `pack`, padding of decode rows included."""
    ordered = sorted(((part.start, part.length) for part in parts), key=lambda span: span[1] > 1)
    singles = sum(part.length == 1 for part in parts)
    return [*ordered[:singles], *[(0, 0)] * (shape.decodes - singles), *ordered[singles:]]


def nothing_but_decodes(parts: Sequence[Slice]) -> bool:
    """Whether every slice is one token that samples."""
    return all(part.length == 1 and part.samples for part in parts)


def least_shape(parts: Sequence[Slice]) -> Shape:
    """The shape with as little padding as kernels need."""
    if nothing_but_decodes(parts):
        return Shape(len(parts))
    lengths = [part.length for part in parts]
    singles = lengths.count(1)
    return Shape(
        decodes=singles + -singles % ROWS,
        tokens=sum(lengths) - singles,
        slices=_padded_slices(len(parts) - singles),
        rows=sum(part.samples for part in parts),
    )


def _padded_slices(count: int) -> int:
    """As many slices as the next bucket has; none stay none."""
    return count and next((size for size in SLICES if size >= count), count)


def pack(placed: Sequence[Resident], parts: Sequence[Slice], shape: Shape, scratch: int) -> tuple[Words, Sampled]:
    """A batch as numbers in a row, and whose tokens it samples. Rows of padding are the scratch slot's.

    Of decodes only: slots, and contexts (how many tokens are seen; 0 is padding). Of others: slot and position (-1 is
    padding) of every token; slot and context of every decode row and prefill; where each prefill begins in the batch,
    and the end of the last; the tokens whose successor is wanted.
    """
    packed = np.empty(sum(shape.sizes), dtype=np.int64)
    views = np.split(packed, list(accumulate(shape.sizes))[:-1])
    fill = _fill_decodes if shape.rows is None else _fill_mixed
    return packed, fill(views, placed, parts, shape, scratch)


def _fill_decodes(
    views: list[Words], placed: Sequence[Resident], parts: Sequence[Slice], shape: Shape, scratch: int
) -> Sampled:
    (slots, contexts), count = views, len(parts)
    slots[:count], slots[count:] = slots_of(placed), scratch
    contexts[:count], contexts[count:] = [part.start for part in parts], 0
    contexts[:count] += 1
    return Sampled(list(placed), contexts[:count].tolist())


def _fill_mixed(
    views: list[Words], placed: Sequence[Resident], parts: Sequence[Slice], shape: Shape, scratch: int
) -> Sampled:
    """Slices of one token become decode rows, whatever they are."""
    token_slots, positions, slots, contexts, offsets, rows = views
    order = sorted(range(len(parts)), key=lambda index: parts[index].length > 1)
    parts, placed = [parts[index] for index in order], [placed[index] for index in order]
    owners, starts, lengths = (
        np.array(values, dtype=np.int64)
        for values in (slots_of(placed), [part.start for part in parts], [part.length for part in parts])
    )
    first, singles = shape.decodes, int(np.count_nonzero(lengths == 1))
    edges = np.cumsum((first, *lengths[singles:]))
    token_slots[:] = slots[:] = scratch
    positions[:], contexts[:], offsets[:], rows[:] = -1, 0, edges[-1], len(positions) - 1
    end, prefills = edges[-1], slice(first, first + len(parts) - singles)
    token_slots[:singles] = slots[:singles] = owners[:singles]
    positions[:singles], contexts[:singles] = starts[:singles], starts[:singles] + 1
    token_slots[first:end] = np.repeat(owners[singles:], lengths[singles:])
    # Token i of the batch is at position i - edge + start of its slice.
    positions[first:end] = np.repeat(starts[singles:] - edges[:-1], lengths[singles:]) + np.arange(first, end)
    slots[prefills], contexts[prefills] = owners[singles:], starts[singles:] + lengths[singles:]
    offsets[: len(edges)] = edges[: len(offsets)]
    samples = np.array([part.samples for part in parts], dtype=bool)
    last = np.concatenate((np.arange(singles), edges[1:] - 1))[samples]
    rows[: len(last)] = last
    sampling = [resident for resident, part in zip(placed, parts, strict=True) if part.samples]
    return Sampled(sampling, (starts + lengths)[samples].tolist())


class Picked(NamedTuple):
    """Ids of the wanted rows and, if somebody asked, their table of logprobs, see `share_table`."""

    ids: Tensor
    logprobs: Tensor | None = None


class Forward:
    """The model with a KV pool and the state of the slots."""

    def __init__(self, model: Decoder, state: SlotState, pool: KvPool) -> None:
        self._model = model
        self._state = state
        self._pool = pool

    def __call__(
        self, packed: Tensor, shape: Shape, picking: Picking, top: int = 0, known: Sequence[Span] = ()
    ) -> Picked:
        """The model and `pick`, of a batch that `pack` packed; `known`: see `logits`."""
        return self.pick(self.logits(packed, shape, known), packed, shape, picking, top)

    @torch.inference_mode()
    def logits(self, packed: Tensor, shape: Shape, known: Sequence[Span] = ()) -> Tensor:
        """Of the wanted rows, [rows, vocabulary]. `known`: the batch's `spans`, unless a graph will serve others."""
        run = self._decode if shape.rows is None else self._mixed
        return run(packed.split(shape.sizes), shape, known)

    def _decode(self, parts: tuple[Tensor, ...], shape: Shape, known: Sequence[Span]) -> Tensor:
        slots, contexts = parts
        tables = self._state.tables.index_select(0, slots)
        batch = DeviceBatch(shape.decodes, contexts.int(), tables, spans=known)
        return self._run(slots, contexts - 1, None, batch)

    def _mixed(self, parts: tuple[Tensor, ...], shape: Shape, known: Sequence[Span]) -> Tensor:
        token_slots, positions, slots, contexts, offsets, rows = parts
        batch = DeviceBatch(
            decodes=shape.decodes,
            contexts=contexts.int(),
            tables=self._state.tables.index_select(0, slots),
            offsets=offsets.int() if shape.slices else None,
            tokens=shape.tokens,
            spans=known,
        )
        return self._run(token_slots, positions, rows, batch)

    def _run(self, slots: Tensor, positions: Tensor, rows: Tensor | None, batch: DeviceBatch) -> Tensor:
        state, real = self._state, positions.clamp(min=0)
        places = state.kv_places(slots, real).masked_fill_(positions < 0, -1)
        return self._model(Inputs(state.tokens(slots, real), real, places, rows, batch), self._pool)

    @torch.inference_mode()
    def pick(self, logits: Tensor, packed: Tensor, shape: Shape, picking: Picking, top: int = 0) -> Picked:
        """A token for each wanted row, stored and counted where the next step finds it.

        `picking` is all that some row asks for, `top` how many alternatives its logprobs hold.
        """
        state, ops = self._state, self._model.ops
        slots, positions = _wanted(packed.split(shape.sizes), shape)
        rows = state.sampling(slots, positions, picking) if picking & ~Picking.LOGPROBS else None
        ids: Tensor = ops.pick(logits, rows)
        state.store(slots, positions, ids)
        if state.counts is not None and Picking.PENALTIES in picking:
            ops.count_tokens(state.counts, state.counted(slots), ids)
        return Picked(ids, share_table(logits, ids, top, ops) if Picking.LOGPROBS in picking else None)


def _wanted(parts: tuple[Tensor, ...], shape: Shape) -> tuple[Tensor, Tensor]:
    """Slots of the tokens that are wanted, and the positions they will have."""
    if shape.rows is None:
        slots, contexts = parts
        return slots, contexts
    token_slots, positions, *_, rows = parts
    return token_slots.index_select(0, rows), positions.index_select(0, rows) + 1
