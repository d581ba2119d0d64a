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

from engine.cuda.residents import Batch, Sampled
from engine.cuda.state import Picking, SlotState, Words
from engine.kv import KvPool
from engine.logprobs import share_table
from engine.models.decoder import Decoder, Inputs
from kernels.batch import DeviceBatch, Span
from playground.graphs import CHUNKS
from playground.halves import cut

ROWS = 8
"""Decode rows are a multiple of this beside prefills: what follows them in memory is aligned then."""

SLICES = (CHUNKS, 64, 256)
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
    pooled: tuple[int, ...] = ()
    """As many rows as each replica brings to the experts, where these meet the tokens of several."""

    @property
    def sizes(self) -> list[int]:
        """Of the parts of a packed batch, see `pack`."""
        if self.rows is None:
            return [self.decodes] * 2
        tokens, slices = self.all_tokens, self.decodes + self.slices
        return [tokens, tokens, slices, slices, self.slices and self.slices + 1, self.rows]

    @property
    def all_tokens(self) -> int:
        """Of decodes and prefills."""
        return self.decodes + self.tokens

    @property
    def wanted(self) -> int:
        """Rows of logits."""
        return self.decodes if self.rows is None else self.rows


class Turns(NamedTuple):
    """Two batches, one packed behind the other, that compute by turns; the second's tokens come later in sequences."""

    first: Shape
    second: Shape

    @property
    def sizes(self) -> list[int]:
        """Of the parts of what is packed."""
        return self.first.sizes + self.second.sizes

    @property
    def all_tokens(self) -> int:
        return self.first.all_tokens + self.second.all_tokens

    @property
    def wanted(self) -> int:
        return self.first.wanted + self.second.wanted


def spans(batch: Batch, shape: Shape) -> list[Span]:
    """Start and length of the slices in the order of `pack`, padding of decode rows included."""
    pairs = zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ordered, singles = sorted(pairs, key=lambda span: span[1] > 1), batch.singles
    return [*ordered[:singles], *[(0, 0)] * (shape.decodes - singles), *ordered[singles:]]


def least_shape(batch: Batch) -> Shape:
    """The shape with as little padding as kernels need."""
    if batch.nothing_but_decodes:
        return Shape(len(batch.starts))
    singles = batch.singles
    return Shape(
        decodes=singles + -singles % ROWS,
        tokens=int(batch.lengths.sum()) - singles,
        slices=_padded_slices(len(batch.starts) - singles),
        rows=int(np.count_nonzero(batch.samples)),
    )


def _padded_slices(count: int) -> int:
    """As many slices as the next bucket has; none stay none."""
    return count and next((size for size in SLICES if size >= count), count)


def pack(batch: Batch, shape: Shape, scratch: int) -> tuple[Words, Sampled]:
    """A batch as numbers in a row, and whose tokens it samples. Rows of padding are the scratch slot's.

    Of decodes only: slots, and contexts (how many tokens are seen; 0 is padding). Of others: slot and position (-1 is
    padding) of every token; slot and context of every decode row and prefill; where each prefill begins in the batch,
    and the end of the last; the tokens whose successor is wanted.
    """
    packed = np.empty(sum(shape.sizes), dtype=np.int64)
    fill = _fill_decodes if shape.rows is None else _fill_mixed
    return packed, fill(packed, batch, shape, scratch)


def _fill_decodes(packed: Words, batch: Batch, shape: Shape, scratch: int) -> Sampled:
    slots, contexts, count = packed[: shape.decodes], packed[shape.decodes :], len(batch.starts)
    slots[:count], slots[count:] = batch.rows.slots, scratch
    contexts[:count], contexts[count:] = batch.ends, 0
    return Sampled(batch.rows.residents, contexts[:count].tolist())


def _fill_mixed(packed: Words, batch: Batch, shape: Shape, scratch: int) -> Sampled:
    """Slices of one token become decode rows, whatever they are."""
    token_slots, positions, slots, contexts, offsets, rows = np.split(packed, list(accumulate(shape.sizes))[:-1])
    order = np.argsort(batch.lengths > 1, kind="stable")
    owners, starts, lengths, samples = (
        column[order] for column in (batch.rows.slots, batch.starts, batch.lengths, batch.samples)
    )
    first, singles = shape.decodes, batch.singles
    edges = np.cumsum((first, *lengths[singles:]))
    token_slots[:] = slots[:] = scratch
    positions[:], contexts[:], offsets[:], rows[:] = -1, 0, edges[-1], len(positions) - 1
    end, prefills = edges[-1], slice(first, first + len(order) - singles)
    token_slots[:singles] = slots[:singles] = owners[:singles]
    positions[:singles], contexts[:singles] = starts[:singles], starts[:singles] + 1
    token_slots[first:end] = np.repeat(owners[singles:], lengths[singles:])
    # Token i of the batch is at position i - edge + start of its slice.
    positions[first:end] = np.repeat(starts[singles:] - edges[:-1], lengths[singles:]) + np.arange(first, end)
    slots[prefills], contexts[prefills] = owners[singles:], starts[singles:] + lengths[singles:]
    offsets[: len(edges)] = edges[: len(offsets)]
    last = np.concatenate((np.arange(singles), edges[1:] - 1))[samples]
    rows[: len(last)] = last
    residents = [batch.rows.residents[index] for index in order[samples]]
    return Sampled(residents, (starts + lengths)[samples].tolist())


Parts = tuple[Tensor, ...]
"""Of a packed batch."""

Known = Sequence[Sequence[Span]]
"""Spans of each pass."""


class Picked(NamedTuple):
    """Ids of the wanted rows and, if somebody asked, their table of logprobs, see `share_table`."""

    ids: Tensor
    logprobs: Tensor | None = None


class Forward:
    """The model, or a stage of it, with a KV pool and the state of the slots. It exchanges nothing between stages."""

    def __init__(self, model: Decoder, state: SlotState, pool: KvPool, hidden: Tensor | None = None) -> None:
        """`hidden`: where a step's hidden states lie if another stage computes them, [most tokens, hidden]."""
        self._model = model
        self._state = state
        self._pool = pool
        self._hidden = hidden
        self.picks = model.part.last
        """Whether tokens come of it; of a stage before the last one hidden states do."""

    def __call__(
        self, packed: Tensor, shape: Shape | Turns, picking: Picking, top: int = 0, known: Known = ()
    ) -> Picked | Tensor:
        """The body and what ends it, of a batch that `pack` packed; `known`: see `body`."""
        return self.ended(self.body(packed, shape, known), packed, shape, picking, top)

    def ended(
        self, found: Tensor, packed: Tensor, shape: Shape | Turns, picking: Picking, top: int = 0
    ) -> Picked | Tensor:
        """What a step comes to with what its body found: tokens, or hidden states as they are."""
        return self.pick(found, packed, shape, picking, top) if self.picks else found

    @torch.inference_mode()
    def body(self, packed: Tensor, shape: Shape | Turns, known: Known = ()) -> Tensor:
        """Logits of the wanted rows, [rows, vocabulary]; hidden states of all tokens before the last stage.

        `known`: each pass's `spans`, unless a graph will serve other batches.
        """
        first, *later = self._passes(packed.split(shape.sizes), shape, known)  # one at most
        x = None if self._hidden is None else self._hidden[: shape.all_tokens]
        return self._model.body(first, self._pool, x, *later)

    def _passes(self, parts: Parts, shape: Shape | Turns, known: Known) -> list[Inputs]:
        if isinstance(shape, Turns):
            edge, (early, late) = len(shape.first.sizes), known
            return [self._pass(parts[:edge], shape.first, early), self._pass(parts[edge:], shape.second, late)]
        own = known[0] if known else ()
        # In lockstep nobody halves unless all do, and then before batches are packed.
        if shape.rows is not None or shape.pooled or not self._model.part.overlap.halves(shape.decodes):
            return [self._pass(parts, shape, own)]
        edge = cut((), shape.decodes, 0.0).rows
        halves = slice(edge), slice(edge, None)
        slots, contexts = parts
        return [self._decode(slots[half], contexts[half], shape, own[half]) for half in halves]

    def _pass(self, parts: Parts, shape: Shape, known: Sequence[Span]) -> Inputs:
        if shape.rows is not None:
            return self._mixed(parts, shape, known)
        slots, contexts = parts
        return self._decode(slots, contexts, shape, known)

    def _decode(self, slots: Tensor, contexts: Tensor, shape: Shape, known: Sequence[Span]) -> Inputs:
        tables = self._state.tables.index_select(0, slots)
        batch = DeviceBatch(len(slots), contexts.int(), tables, spans=known)
        return self._inputs(slots, contexts - 1, None, batch, shape.pooled)

    def _mixed(self, parts: Parts, shape: Shape, known: Sequence[Span]) -> Inputs:
        token_slots, positions, slots, contexts, offsets, rows = parts
        batch = DeviceBatch(
            decodes=shape.decodes,
            contexts=contexts.int(),
            tables=self._state.tables.index_select(0, slots),
            offsets=offsets.int() if shape.slices else None,
            tokens=shape.tokens,
            spans=known,
        )
        return self._inputs(token_slots, positions, rows, batch, shape.pooled)

    def _inputs(
        self, slots: Tensor, positions: Tensor, rows: Tensor | None, batch: DeviceBatch, pooled: tuple[int, ...]
    ) -> Inputs:
        state, real = self._state, positions.clamp(min=0)
        places = state.kv_places(slots, real).masked_fill_(positions < 0, -1)
        return Inputs(state.tokens(slots, real), real, places, rows, batch, pooled)

    @torch.inference_mode()
    def pick(self, logits: Tensor, packed: Tensor, shape: Shape | Turns, picking: Picking, top: int = 0) -> Picked:
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


def _wanted(parts: Parts, shape: Shape | Turns) -> tuple[Tensor, Tensor]:
    """Slots of the tokens that are wanted, and the positions they will have."""
    if isinstance(shape, Turns):
        edge = len(shape.first.sizes)
        both = _wanted(parts[:edge], shape.first), _wanted(parts[edge:], shape.second)
        slots, positions = (torch.cat(pair) for pair in zip(*both, strict=True))
        return slots, positions
    if shape.rows is None:
        slots, contexts = parts
        return slots, contexts
    token_slots, positions, *_, rows = parts
    return token_slots.index_select(0, rows), positions.index_select(0, rows) + 1
