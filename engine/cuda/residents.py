"""The host's side of what the device remembers: who sits in which slot, and what of it the device has not heard yet.

It touches no tensor. Numbers to be sent are collected while slices are placed and handed over once a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from engine.cuda.state import Picking, SlotState, Words, picking
from engine.errors import EngineError
from engine.logprobs import read_logprob
from engine.sequence import Sequence as Text
from engine.sequence import token_counts
from playground.core import COPY_IN, Copy, Logprob, Request, Slice


@dataclass(slots=True)
class Resident:
    """A sequence that the backend knows."""

    text: Text
    picking: int
    """What its request asks for, a `Picking` (as a plain number, since flags of `enum` are slow to combine)."""
    slot: int | None = None
    ready: int = 0
    """Up to where the device's row of tokens can be read, by work that is queued from now on."""
    tabled: int = 0
    """How many blocks of the table the device has been told."""
    room: int = 0
    """Tokens that the blocks hold; 0 if the device's table is out of date."""
    last: int = 0
    """The last batch that it had a slice in."""
    counted: int = 0
    """Up to where the device has counted its tokens, if it is penalised, by work that is queued from now on."""


class Sampled(NamedTuple):
    """Whose tokens a batch samples, and the position each will have."""

    residents: list[Resident]
    positions: list[int]


class Residents:
    """Slots are given on demand and taken back when a sequence ends, or from one that has waited longest.

    A preempted sequence may lose its slot and get another: everything of it is known to the host by then.
    """

    def __init__(self, state: SlotState, vocabulary: int, eos: tuple[int, ...]) -> None:
        self._state = state
        self._vocabulary = vocabulary
        self._eos = eos
        self._known: dict[int, Resident] = {}
        self._free = list(range(state.scratch))
        self.order = 0
        """Batches placed so far."""
        self.completed = 0
        """Batches, in the order they were placed, whose work is all done."""
        self._places: list[Words] = []
        self._words: list[Words] = []

    def start(self, requests: Iterable[Request]) -> None:
        for request in requests:
            text = Text(request, self._vocabulary)
            self._known[request.id] = Resident(text, int(picking(request.sampling)))

    def end(self, ids: Iterable[int]) -> None:
        """Forget sequences that no later step names. Work in flight may yet write to their slots, but before others."""
        for id in ids:
            resident = self._known.pop(id, None)
            if resident is not None and resident.slot is not None:
                self._free.append(resident.slot)

    # --- slices

    def place(self, parts: Sequence[Slice]) -> list[Resident]:
        """Take in a batch of slices. What cannot be computed from known tokens in given blocks is an error."""
        self.order += 1
        placed, known, order = [], self._known, self.order
        for part in parts:
            resident = known.get(part.sequence)
            if resident is None:
                raise _unknown(part.sequence)
            end = part.start + part.length
            # Nearly all slices are decodes that bring nothing new: keep their path short.
            if part.blocks or end > resident.room:
                self._bring(resident, part)
            if end > resident.ready:
                self._feed(resident, part.start, end)
            if part.samples:
                resident.ready = end + 1
            resident.last = order
            placed.append(resident)
        return placed

    def _bring(self, resident: Resident, part: Slice) -> None:
        """Blocks, an epoch, or a slot that is missing."""
        text, end = resident.text, part.start + part.length
        if part.epoch != text.epoch:
            resident.ready = resident.tabled = 0
        text.place(part.epoch, part.blocks)
        self._send_table(resident)
        if end > resident.room:
            raise EngineError(
                f"sequence {part.sequence}: {end} tokens do not fit its {len(text.table)} blocks of "
                f"{self._state.block_size}"
            )

    def _send_table(self, resident: Resident) -> None:
        if resident.slot is None:
            self._seat(resident)
        table = resident.text.table
        if len(table) > self._state.width:
            raise EngineError(
                f"sequence {resident.text.request.id}: {len(table)} blocks are more than max_length allows"
            )
        if len(table) > resident.tabled:
            self._send(self._state.table_place(_slot(resident), resident.tabled), table.ids[resident.tabled :])
        resident.tabled = len(table)
        resident.room = len(table) * self._state.block_size

    def _feed(self, resident: Resident, start: int, end: int) -> None:
        """Tokens that the host knows and the device does not."""
        text, first = resident.text, max(start, resident.ready)
        if end > text.known:
            known = max(text.known, resident.ready)
            raise EngineError(f"sequence {text.request.id}: position {end - 1} has no token yet; {known} known")
        self._send(self._state.token_place(_slot(resident), first), text.tokens[first:end])
        resident.ready = end

    def _send(self, place: int, words: Words) -> None:
        self._places.append(np.arange(place, place + len(words)))
        self._words.append(words)

    def news(self) -> tuple[Words, Words]:
        """Places and words that the device must be told before this step's work; empty if there are none."""
        if not self._places:
            return _NOTHING, _NOTHING
        news = np.concatenate(self._places), np.concatenate(self._words)
        self._places, self._words = [], []
        return news

    # --- slots

    def _seat(self, resident: Resident) -> None:
        slot = self._free.pop() if self._free else self._unseat()
        resident.slot, resident.ready, resident.tabled, resident.counted = slot, 0, 0, 0
        places, words = self._state.sampling_words(slot, resident.text.request.sampling)
        self._places.append(places)
        self._words.append(words)

    def _unseat(self) -> int:
        """The slot of whom the device has not heard of for longest."""
        idle = [r for r in self._known.values() if r.slot is not None and r.last <= self.completed]
        if not idle:
            raise EngineError(f"all {self._state.scratch} slots are in flight; raise max_seqs")
        victim = min(idle, key=lambda resident: resident.last)
        slot = _slot(victim)
        victim.slot, victim.room = None, 0
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
        resident.room = resident.tabled = 0

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


def asked(placed: Iterable[Resident]) -> Picking:
    """All that these ask for."""
    return Picking(reduce(or_, [resident.picking for resident in placed]))


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


def slots_of(placed: Iterable[Resident]) -> list[int]:
    """Slots of residents that were placed, and so have one."""
    slots: list[Any] = [resident.slot for resident in placed]
    return slots


def _slot(resident: Resident) -> int:
    assert resident.slot is not None
    return resident.slot


def _unknown(id: int) -> EngineError:
    return EngineError(f"sequence {id}: no step has started it, or one has ended it")
