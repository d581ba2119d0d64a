"""The host's side of what the device remembers: who sits in which slot, and what of it the device has not heard yet.

It touches no tensor. Numbers to be sent are collected while slices are placed and handed over once a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cuda.state import Picking, SlotState, Words, picking
from engine.errors import EngineError
from engine.logprobs import read_logprob
from engine.sequence import Sequence as Text
from engine.sequence import token_counts
from playground.core import COPY_IN, Columns, Copy, Logprob, Request


@dataclass(slots=True)
class Resident:
    """A sequence that the backend knows."""

    text: Text
    picking: int
    """What its request asks for, a `Picking` (as a plain number, since flags of `enum` are slow to combine)."""
    slot: int | None = None
    tabled: int = 0
    """How many blocks of the table the device has been told."""
    counted: int = 0
    """Up to where the device has counted its tokens, if it is penalised, by work that is queued from now on."""


class Rows(NamedTuple):
    """Whose the slices of a batch are."""

    residents: list[Resident]
    slots: Words
    picking: Picking
    """All that they ask for."""

    @classmethod
    def of(cls, residents: list[Resident]) -> Rows:
        """Of residents that have a slot."""
        slots: list[Any] = [resident.slot for resident in residents]
        asked = reduce(or_, [resident.picking for resident in residents], Picking.GREEDY)
        return cls(residents, np.array(slots, dtype=np.int64), Picking(asked))


class Batch(NamedTuple):
    """Slices that run together, in columns: one by one they would take longer than all at once."""

    rows: Rows
    starts: Words
    lengths: Words
    samples: NDArray[np.bool_]
    singles: int
    """Slices of one token."""

    @classmethod
    def of(cls, rows: Rows, starts: Sequence[int], lengths: Sequence[int], samples: Sequence[bool]) -> Batch:
        return cls(
            rows,
            np.array(starts, dtype=np.int64),
            np.array(lengths, dtype=np.int64),
            np.array(samples, dtype=bool),
            lengths.count(1),
        )

    @classmethod
    def empty(cls) -> Batch:
        """Of a rank that has nothing to do but for others."""
        return cls.of(Rows.of([]), [], [], [])

    @property
    def ends(self) -> Words:
        return self.starts + self.lengths

    @property
    def nothing_but_decodes(self) -> bool:
        """Whether every slice is one token that samples."""
        return self.singles == len(self.starts) and bool(self.samples.all())


class Sampled(NamedTuple):
    """Whose tokens a batch samples, and the position each will have."""

    residents: list[Resident]
    positions: list[int]


class Residents:
    """Slots are given on demand and taken back when a sequence ends, or from one that has waited longest.

    A preempted sequence may lose its slot and get another: everything of it is known to the host by then.

    Of a pipeline's stages only the first one embeds tokens and must have them, and only the last one picks any.
    `forwards`: sampled tokens get to this device's rows without its host.
    """

    def __init__(
        self,
        state: SlotState,
        vocabulary: int,
        eos: tuple[int, ...],
        embeds: bool = True,
        picks: bool = True,
        forwards: bool = True,
    ) -> None:
        self._state = state
        self._embeds = embeds
        self._picks = picks
        self._forwards = forwards
        self._vocabulary = vocabulary
        self._eos = eos
        self._known: dict[int, Resident] = {}
        self._free = list(range(state.scratch))
        self._ids: tuple[int, ...] = ()
        self._rows: Rows | None = None
        """Of the last batch and its `_ids`: the next one has the same, unless somebody comes, goes or loses a slot."""
        self._ready = np.zeros(state.scratch, dtype=np.int64)
        """By slot: up to where the device's row of tokens can be read, by work that is queued from now on."""
        self._room = np.zeros(state.scratch, dtype=np.int64)
        """By slot: tokens that the blocks hold; 0 if the device's table is out of date."""
        self._last = np.zeros(state.scratch, dtype=np.int64)
        """By slot: the last batch that its owner had a slice in."""
        self._promised = np.zeros(state.scratch, dtype=np.int64)
        """By slot: the last batch that samples a token of its owner's."""
        self.order = 0
        """Batches placed so far."""
        self.completed = 0
        """Batches, in the order they were placed, whose work is all done."""
        self._places: list[Words] = []
        self._words: list[Words] = []
        self._block_places: list[int] = []
        # Of tables: most bring one block, and an array for each would take longer.
        self._block_ids: list[int] = []

    def start(self, requests: Iterable[Request]) -> None:
        for request in requests:
            text, self._rows = Text(request, self._vocabulary), None
            asked = picking(request.sampling) if self._picks else Picking.GREEDY
            self._known[request.id] = Resident(text, int(asked))

    def end(self, ids: Iterable[int]) -> None:
        """Forget sequences that no later step names. Work in flight may yet write to their slots, but before others."""
        for id in ids:
            resident, self._rows = self._known.pop(id, None), None
            if resident is not None and resident.slot is not None:
                self._free.append(resident.slot)
                resident.slot = None

    def learn(self, sequence: int, position: int, token: int) -> None:
        """A token that another stage sampled, for the one that embeds it. Of the forgotten nothing is kept.

        Who sampled it knows more by now than it says.
        """
        resident = self._known.get(sequence)
        if resident is not None and self._embeds:
            resident.text.accept(position, token, self._eos)

    # --- slices

    def place(self, slices: Columns) -> Batch:
        """Take in a batch of slices. What cannot be computed from known tokens in given blocks is an error."""
        self.order += 1
        rows = self._rows if self._rows is not None and self._ids == slices.sequence else self._find(slices.sequence)
        batch = Batch.of(rows, slices.start, slices.length, slices.samples)
        (residents, slots, _), ends = rows, batch.ends
        self._last[slots] = self.order
        # Nearly all slices are decodes that bring nothing new: only the others are looked at one by one.
        lacking = np.flatnonzero(ends > self._room[slots]).tolist()
        for index in sorted({*lacking, *compress(range(len(slots)), slices.blocks)}):
            self._bring(residents[index], slices.epoch[index], slices.blocks[index])
        lacking = np.flatnonzero(ends > self._room[slots]).tolist()
        if lacking:
            raise self._without_blocks(residents[lacking[0]], ends[lacking[0]])
        if self._embeds:
            self._prepare(batch)
        return batch

    def _prepare(self, batch: Batch) -> None:
        """See to it that the device has all tokens of a batch."""
        (residents, slots, _), ends = batch.rows, batch.ends
        for index in np.flatnonzero(ends > self._ready[slots]).tolist():
            self._feed(residents[index], int(batch.starts[index]), int(ends[index]))
        if self._forwards:
            self._ready[slots[batch.samples]] = ends[batch.samples] + 1

    def promise(self, batch: Batch) -> int:
        """The last batch before this one that samples a token of one of its sequences; 0: none does."""
        slots = batch.rows.slots
        newest = int(self._promised[slots].max())
        self._promised[slots[batch.samples]] = self.order
        return newest

    def _find(self, ids: tuple[int, ...]) -> Rows:
        """The residents that a batch is of, each in a slot."""
        try:
            residents = [self._known[id] for id in ids]
        except KeyError as error:
            raise _unknown(error.args[0]) from None
        self._last[[resident.slot for resident in residents if resident.slot is not None]] = self.order
        for resident in residents:
            if resident.slot is None:
                self._seat(resident)
        self._ids, self._rows = ids, Rows.of(residents)
        return self._rows

    def _bring(self, resident: Resident, epoch: int, blocks: tuple[int, ...]) -> None:
        """Blocks, an epoch, or a table that the device lacks."""
        text, slot, told = resident.text, _slot(resident), resident.tabled
        if epoch != text.epoch:
            self._ready[slot] = told = 0
        text.place(epoch, blocks)
        table = text.table.ids
        count = len(table)
        if count > self._state.width:
            raise EngineError(f"sequence {text.request.id}: {count} blocks are more than max_length allows")
        if count > told:
            place = self._state.table_place(slot, told)
            self._block_places.extend(range(place, place + count - told))
            self._block_ids.extend(table[told:].tolist())
        resident.tabled = count
        self._room[slot] = count * self._state.block_size

    def _without_blocks(self, resident: Resident, end: int) -> EngineError:
        id, blocks, size = resident.text.request.id, len(resident.text.table), self._state.block_size
        return EngineError(f"sequence {id}: {end} tokens do not fit its {blocks} blocks of {size}")

    def _feed(self, resident: Resident, start: int, end: int) -> None:
        """Tokens that the host knows and the device does not."""
        text, slot = resident.text, _slot(resident)
        ready = int(self._ready[slot])
        first = max(start, ready)
        if end > text.known:
            known = max(text.known, ready)
            raise EngineError(f"sequence {text.request.id}: position {end - 1} has no token yet; {known} known")
        place = self._state.token_place(slot, first)
        self._tell(np.arange(place, place + end - first), text.tokens[first:end])
        self._ready[slot] = end

    def _tell(self, places: Words, words: Words) -> None:
        self._places.append(places)
        self._words.append(words)

    def news(self) -> tuple[Words, Words]:
        """Places and words that the device must be told before this step's work; empty if there are none."""
        self._tell(np.array(self._block_places, dtype=np.int64), np.array(self._block_ids, dtype=np.int64))
        news = np.concatenate(self._places), np.concatenate(self._words)
        for told in (self._places, self._words, self._block_places, self._block_ids):
            told.clear()
        return news

    # --- slots

    def _seat(self, resident: Resident) -> None:
        slot = self._free.pop() if self._free else self._unseat()
        resident.slot, resident.tabled, resident.counted = slot, 0, 0
        self._ready[slot], self._room[slot], self._promised[slot], self._last[slot] = 0, 0, 0, self.order
        self._tell(*self._state.sampling_words(slot, resident.text.request.sampling))

    def _unseat(self) -> int:
        """The slot of whom the device has not heard of for longest."""
        seated = [resident for resident in self._known.values() if resident.slot is not None]
        victim = min(seated, key=lambda resident: int(self._last[_slot(resident)]))
        slot = _slot(victim)
        if self._last[slot] > self.completed:
            raise EngineError(f"all {self._state.scratch} slots are in flight; raise max_seqs")
        victim.slot = self._rows = None
        return slot

    # --- penalties

    def recount(self, sampled: Sampled) -> tuple[Words, Words, Words]:
        """What the device must know before it penalises: slots whose counts begin anew, their places and values there.

        Counts are current as long as the device itself samples, and so counts, token after token. They are not in a
        slot that was just given, nor where a position is sampled again; then all tokens before are known to the host.
        """
        slots, places, values = [_NOTHING], [_NOTHING], [_NOTHING]
        for resident, position in zip(*sampled, strict=True):
            if not resident.picking & Picking.PENALTIES:
                continue
            if resident.counted != position:
                counts, slot = token_counts(resident.text, position, self._vocabulary), _slot(resident)
                seen = counts.nonzero()[0]
                slots.append(np.array([slot]))
                places.append(slot * self._vocabulary + seen)
                values.append(counts[seen].astype(np.int64))
            resident.counted = position + 1
        return np.concatenate(slots), np.concatenate(places), np.concatenate(values)

    # --- copies and results

    def move(self, copy: Copy) -> None:
        """From now on the sequence's blocks are the target's; on the host it has none that a slice could use."""
        resident = self._known.get(copy.sequence)
        if resident is None:
            raise _unknown(copy.sequence)
        text = resident.text
        text.table.clear()
        text.table.extend(copy.target if copy.lane == COPY_IN else ())
        text.epoch = copy.epoch
        resident.tabled = 0
        if resident.slot is not None:
            self._room[resident.slot] = 0

    def take_back(self, sampled: Sampled, tokens: list[int]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """Note sampled tokens: those of each sequence that was still going on, and the sequences that ended."""
        brought: dict[int, tuple[int, ...]] = {}
        ended: list[int] = []
        for resident, position, token in zip(sampled.residents, sampled.positions, tokens, strict=True):
            text = resident.text
            if text.accept(position, token, self._eos):  # else it was launched before its sequence's end was known
                brought[text.request.id] = (token,)
                if text.end is not None:
                    ended.append(text.request.id)
        return brought, tuple(ended)


_NOTHING: Words = np.empty(0, dtype=np.int64)


def top_asked(placed: Iterable[Resident]) -> int:
    """The most alternatives that one of these wants to know of its tokens."""
    return max(resident.text.request.sampling.logprobs or 0 for resident in placed)


def told(sampled: Sampled, table: Sequence[Sequence[float]], brought: Container[int]) -> dict[int, tuple[Logprob, ...]]:
    """Logprobs of those who asked, of the sequences that `brought` tokens; a row of the table for each that sampled."""
    found: dict[int, tuple[Logprob, ...]] = {}
    for resident, shares in zip(sampled.residents, table, strict=True):
        request = resident.text.request
        if (top := request.sampling.logprobs) is not None and request.id in brought:
            found[request.id] = (read_logprob(shares, top),)
    return found


def _slot(resident: Resident) -> int:
    assert resident.slot is not None
    return resident.slot


def _unknown(id: int) -> EngineError:
    return EngineError(f"sequence {id}: no step has started it, or one has ended it")
