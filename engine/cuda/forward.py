"""From numbers on the device to sampled tokens on the device: one pass of the model, with nothing read back.

The same for a captured graph, whose rows are padded to a bucket, and for a step of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.residents import Resident, Sampled, slots_of
from engine.cuda.state import SlotState, Words
from engine.kv import KvPool
from engine.models.decoder import Decoder, Inputs
from kernels.batch import DeviceBatch
from playground.core import Slice

ROWS = 8
"""Decode rows of a mixed step are a multiple of this: what follows them in memory is aligned then."""

SLICES = (16, 64, 256)
"""Prefill slices of a step are padded to one of these: kernels are compiled for each number in a bucket."""


class Packed(NamedTuple):
    """A mixed step as numbers: decode rows first, then the tokens of the prefills, padding between and after."""

    row_slots: Words
    """Of each token, [T]."""
    positions: Words
    """Of each token in its sequence, [T]; -1 is padding."""
    slots: Words
    """Of each decode row, then of each prefill slice, [S]."""
    contexts: Words
    """Tokens that the last query of each of these sees, [S]; 0 is padding."""
    offsets: Words
    """First token of each prefill slice and the end of the last; empty if there are none."""
    rows: Words
    """Tokens whose successor is wanted."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A step of any shape: its numbers, and whose tokens it samples, in order."""

    packed: Packed
    decodes: int
    sampled: Sampled


def pack_decodes(placed: Sequence[Resident], parts: Sequence[Slice], size: int, scratch: int) -> Words:
    """Slots, then contexts, of slices of one token: [2 * size], padded with rows that belong to nobody."""
    rows = np.zeros((2, size), dtype=np.int64)
    count = len(parts)
    rows[0, :count] = slots_of(placed)
    rows[0, count:] = scratch
    rows[1, :count] = [part.start for part in parts]
    rows[1, :count] += 1
    return rows.reshape(-1)


def pack_mixed(placed: Sequence[Resident], parts: Sequence[Slice], scratch: int) -> Mixed:
    """Any slices; those of one token become decode rows, whatever they are."""
    order = sorted(range(len(parts)), key=lambda index: parts[index].length > 1)
    parts, placed = [parts[index] for index in order], [placed[index] for index in order]
    lengths = np.array([part.length for part in parts], dtype=np.int64)
    starts = np.array([part.start for part in parts], dtype=np.int64)
    slots = np.array(slots_of(placed), dtype=np.int64)
    singles = int(np.count_nonzero(lengths == 1))
    idle = -singles % ROWS
    decodes = singles + idle
    # Token i of the batch is at position i - edge + start of its slice.
    edges = np.cumsum((decodes, *lengths[singles:]))
    empty = padded_slices(len(parts) - singles) - (len(parts) - singles)
    positions = np.repeat(starts[singles:] - edges[:-1], lengths[singles:]) + np.arange(decodes, edges[-1])
    last = np.concatenate((np.arange(singles), edges[1:] - 1))
    samples = np.array([part.samples for part in parts], dtype=bool)
    nobody = np.full(idle, scratch)
    packed = Packed(
        row_slots=np.concatenate((slots[:singles], nobody, np.repeat(slots[singles:], lengths[singles:]))),
        positions=np.concatenate((starts[:singles], np.full(idle, -1), positions)),
        slots=np.concatenate((slots[:singles], nobody, slots[singles:], np.full(empty, scratch))),
        contexts=np.concatenate(
            (_padded((starts + lengths)[:singles], idle), _padded((starts + lengths)[singles:], empty))
        ),
        offsets=np.concatenate((edges, np.full(empty, edges[-1]))) if len(parts) > singles else edges[:0],
        rows=last[samples],
    )
    owners = [resident for resident, part in zip(placed, parts, strict=True) if part.samples]
    return Mixed(packed, decodes, Sampled(owners, (starts + lengths)[samples].tolist()))


def padded_slices(count: int) -> int:
    """As many slices as the next bucket has; none stay none."""
    return count and next((size for size in SLICES if size >= count), count)


def _padded(values: Words, more: int) -> Words:
    return np.concatenate((values, np.zeros(more, dtype=np.int64)))


class Forward:
    """The model with a KV pool and the state of the slots."""

    def __init__(self, model: Decoder, state: SlotState, pool: KvPool) -> None:
        self._model = model
        self._state = state
        self._pool = pool

    @torch.inference_mode()
    def decode(self, rows: Tensor, draws: bool) -> Tensor:
        """One token for every row: slots, then contexts, [2 * R] int64 -> ids [R]. Nothing depends on the host."""
        slots, contexts = rows.view(2, -1).unbind(0)
        batch = DeviceBatch(
            decodes=len(slots), contexts=contexts.int(), tables=self._state.tables.index_select(0, slots)
        )
        logits = self._logits(slots, contexts - 1, None, batch)
        return self._pick(logits, slots, contexts, draws)

    @torch.inference_mode()
    def mixed(self, decodes: int, numbers: list[Tensor], draws: bool) -> Tensor:
        """Ids of the wanted rows; `numbers` are those of `Packed`, on the device."""
        row_slots, positions, slots, contexts, offsets, rows = numbers
        batch = DeviceBatch(
            decodes=decodes,
            contexts=contexts.int(),
            tables=self._state.tables.index_select(0, slots),
            offsets=offsets.int() if len(offsets) else None,
            tokens=len(positions) - decodes,
        )
        logits = self._logits(row_slots, positions, rows, batch)
        return self._pick(logits, row_slots.index_select(0, rows), positions.index_select(0, rows) + 1, draws)

    def _logits(self, slots: Tensor, positions: Tensor, rows: Tensor | None, batch: DeviceBatch) -> Tensor:
        state, real = self._state, positions.clamp(min=0)
        places = state.kv_places(slots, real).masked_fill_(positions < 0, -1)
        return self._model(Inputs(state.tokens(slots, real), real, places, rows, batch), self._pool)

    def _pick(self, logits: Tensor, slots: Tensor, positions: Tensor, draws: bool) -> Tensor:
        ids = self._model.ops.pick(logits, self._state.sampling(slots, positions) if draws else None)
        self._state.store(slots, positions, ids)
        return ids
