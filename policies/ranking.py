"""Waiting sequences by a key, kept from step to step: a look costs what has come and gone since, not what waits.

A queue changes at its ends only (arrivals at the back, preempted sequences at the front or the back), so that newcomers
are found without looking at those in between; who has left is dropped when it comes up.
"""

from __future__ import annotations

from collections.abc import Iterator, Reversible, ValuesView
from heapq import heapify, heappop, heappush
from itertools import count, takewhile
from typing import NamedTuple, cast

from playground.sequence import Sequence, State

SLACK = 64
"""Entries of sequences that have left, beyond as many as wait, that are kept before all are looked through."""


class Entry(NamedTuple):
    """One wait of one sequence; compared by key, then id, and by `serial` where a policy serves another run."""

    key: tuple[float, ...]
    id: int
    serial: int
    epoch: int
    sequence: Sequence

    @property
    def waits(self) -> bool:
        sequence = self.sequence
        return sequence.epoch == self.epoch and sequence.state in (State.WAITING, State.SWAPPED)


class Ranking:
    """The waiting sequences of one rank, in shelves that are ordered each for itself.

    Call `refresh` at every look, and `put` each newcomer that it finds. A key must not change while its sequence waits,
    but by another `put`.
    """

    __slots__ = ("_entries", "_known", "_serial", "_shelves")

    def __init__(self) -> None:
        self._known: dict[int, Entry] = {}
        self._shelves: dict[str, list[Entry]] = {}
        self._serial = count()
        self._entries = 0

    def refresh(self, waiting: ValuesView[Sequence]) -> list[Sequence]:
        """Who has come since the last look, in order of the queue."""
        self.tidy(len(waiting))
        back = list(takewhile(self._is_new, reversed(cast(Reversible[Sequence], waiting))))
        back.reverse()
        front = list(takewhile(self._is_new, waiting)) if len(back) < len(waiting) else []
        return front + back

    def _is_new(self, sequence: Sequence) -> bool:
        entry = self._known.get(sequence.id)
        return entry is None or entry.sequence is not sequence or entry.epoch != sequence.epoch

    def tidy(self, waiting: int) -> None:
        """Drop who has left, if those are many more than wait."""
        if self._entries <= 2 * waiting + SLACK:
            return
        self._known = {id: entry for id, entry in self._known.items() if entry.waits}
        for name, shelf in list(self._shelves.items()):
            shelf[:] = [entry for entry in shelf if self._stands(entry)]
            heapify(shelf)
            if not shelf:
                del self._shelves[name]
        self._entries = sum(map(len, self._shelves.values()))

    def _stands(self, entry: Entry) -> bool:
        return entry.waits and self._known.get(entry.id) is entry

    def put(self, sequence: Sequence, key: tuple[float, ...], shelf: str = "") -> None:
        """Give a waiting sequence its place, or a new one."""
        entry = Entry(key, sequence.id, next(self._serial), sequence.epoch, sequence)
        self._known[sequence.id] = entry
        heappush(self._shelves.setdefault(shelf, []), entry)
        self._entries += 1

    @property
    def heads(self) -> dict[str, Sequence]:
        """The first of every shelf that has one."""
        found = {name: self.head(name) for name in list(self._shelves)}
        return {name: head for name, head in found.items() if head is not None}

    def head(self, shelf: str = "") -> Sequence | None:
        """The first of a shelf."""
        entries = self._shelves.get(shelf, [])
        while entries and not self._stands(entries[0]):
            gone = heappop(entries)
            self._entries -= 1
            if self._known.get(gone.id) is gone:
                del self._known[gone.id]
        if not entries:
            self._shelves.pop(shelf, None)
            return None
        return entries[0].sequence

    def in_order(self, shelf: str = "") -> Iterator[Sequence]:
        """All of a shelf, lazily: who was looked at and stays is passed over."""
        passed = None
        while (head := self.head(shelf)) is not passed and head is not None:
            yield head
            passed = head
        if passed is None or head is None:
            return
        ahead = self._shelves[shelf].copy()
        heappop(ahead)
        while ahead:
            entry = heappop(ahead)
            if self._stands(entry):
                yield entry.sequence
