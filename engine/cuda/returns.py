"""Tokens that the last stage of a pipeline samples, on their way to the first one, which embeds them: no host is asked.

So a sequence can go on before its token has come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.cuda.passage import Arrivals, Arriving
from engine.cuda.residents import Sampled
from engine.cuda.state import SlotState, Words

DEPTH = 64
"""Steps whose tokens may be on their way: more than are ever in flight."""


class Due(NamedTuple):
    """What a step that was launched will bring."""

    order: int
    sampled: Sampled
    slots: list[int | None]
    """Whose rows the tokens belong in, as of its launch."""
    arriving: Arriving


class Returns:
    """At the first stage. Tokens are received as soon as they are sent: a sender's host may wait until they are.

    They are stored when a step needs them, and not before, or steps of other sequences would wait for them.
    """

    def __init__(self, arrivals: Arrivals, state: SlotState) -> None:
        self._arrivals = arrivals
        self._state = state
        self._due: deque[Due] = deque()
        self._called: list[Due] = []

    def expect(self, order: int, sampled: Sampled, rows: int) -> None:
        """A step that samples, of which so many rows will be sent, padding included."""
        if rows:
            slots = [one.slot for one in sampled.residents]
            self._due.append(Due(order, sampled, slots, self._arrivals.begin(rows)))

    def call(self, newest: int, order: int) -> list[Words]:
        """Choose those of all steps up to `newest`; slots and positions, to be uploaded, for `store`.

        And of those so long ago, seen from step `order`, that nobody will ask for them.
        """
        self._called = []
        while self._due and self._due[0].order <= max(newest, order - DEPTH // 2):
            self._called.append(self._due.popleft())
        return [words for due in self._called for words in (self._slots(due), np.array(due.sampled.positions))]

    def _slots(self, due: Due) -> Words:
        """Whoever has lost its slot since gets its token from the host when it is wanted."""
        pairs = zip(due.sampled.residents, due.slots, strict=True)
        kept = [slot if slot is not None and one.slot == slot else self._state.scratch for one, slot in pairs]
        return np.array(kept, dtype=np.int64)

    def store(self, places: Sequence[Tensor]) -> None:
        """Tokens that were called for, at what `call` gave, uploaded."""
        for due, slots, positions in zip(self._called, places[::2], places[1::2], strict=True):
            tokens = self._arrivals.read(due.arriving)[: len(slots), 0]
            self._state.store(slots, positions, tokens)
            self._arrivals.over(due.arriving)
