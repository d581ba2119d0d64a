"""Tokens that the last stage of a pipeline samples, straight to the first one, which embeds them: no driver is asked.

So a sequence can go on before its token has come back. On a CPU; of GPUs tells `engine.cuda.returns`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from engine.models.decoder import Neighbour
from engine.sampler import Row
from engine.sequence import Sequence

DEPTH = 64
"""Passes whose tokens may wait to be received."""


class Returns:
    """At the first stage: tokens are received when a slice needs them, and not before."""

    def __init__(self, back: Neighbour, eos: tuple[int, ...]) -> None:
        """`back`: the last stage; `eos`: the model's end tokens."""
        self._back = back
        self._eos = eos
        self._due: deque[list[Row]] = deque()

    def expect(self, rows: list[Row]) -> None:
        """Whose tokens a pass samples."""
        if rows:
            self._due.append(rows)

    def call(self, ends: Mapping[Sequence, int]) -> None:
        """Wait for the tokens that slices need, which end before these positions, and for all before them.

        Nobody else's step has to wait for those: its stage was done with them before. Of so long ago, too, that
        nobody may ever ask.
        """
        wanted = len(self._due) - DEPTH
        for count, rows in enumerate(self._due, 1):
            if any(ends.get(sequence, 0) > position for sequence, position in rows):
                wanted = max(wanted, count)
        for _ in range(wanted):
            self._receive(self._due.popleft())

    def _receive(self, rows: list[Row]) -> None:
        tokens = self._back.receive(torch.empty(len(rows), dtype=torch.int64))
        for (sequence, position), token in zip(rows, tokens.tolist(), strict=True):
            sequence.accept(position, token, self._eos)
