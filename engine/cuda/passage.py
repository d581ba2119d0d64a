"""Hidden states on their way between stages of a pipeline, beside the computing: received ahead, and sent behind.

Graphs read and leave hidden states at fixed places, which the exchange must not wait for: what arrives, and what
leaves, lies in buffers of its own, used by turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.timeline import Mark, Timeline
from engine.models.decoder import Neighbour

TURNS = 2
"""Buffers on either side: one on its way while the other is filled or read. Two stages have four between them."""


class _Turns:
    """Buffers that are used one after another, each when its last use is over."""

    def __init__(self, like: Tensor) -> None:
        self._buffers = [torch.zeros_like(like) for _ in range(TURNS)]
        self._over: list[Mark | None] = [None] * TURNS
        self._turn = 0

    def next(self, timeline: Timeline) -> Tensor:
        """The next buffer; what is queued here from now on comes after its last use."""
        self._turn = (self._turn + 1) % TURNS
        if (over := self._over[self._turn]) is not None:
            timeline.after(over)
        return self._buffers[self._turn]

    def used(self, over: Mark) -> None:
        """The buffer that `next` gave last is free when this is passed."""
        self._over[self._turn] = over


class Inlet:
    """Where the stage before sends to. `like`: [most tokens of a step, hidden]."""

    def __init__(self, neighbour: Neighbour, like: Tensor, timeline: Timeline) -> None:
        self.hidden = torch.zeros_like(like)
        """Hidden states of the step that is computed: its first rows, which it may overwrite."""
        self._neighbour = neighbour
        self._timeline = timeline
        self._turns = _Turns(like)

    def receive(self, tokens: int) -> None:
        """Hidden states of a step's tokens, in order of sending, for what is queued here from now on.

        They arrive as soon as they are sent and a buffer is free, whatever has been queued here before.
        """
        with self._timeline.receiving():
            buffer = self._neighbour.receive(self._turns.next(self._timeline)[:tokens])
            arrived = self._timeline.mark()
        self._timeline.after(arrived)
        self.hidden[:tokens].copy_(buffer)
        self._turns.used(self._timeline.mark())


class Outlet:
    """What the stage after receives. `like` as above."""

    def __init__(self, neighbour: Neighbour, like: Tensor, timeline: Timeline) -> None:
        self._neighbour = neighbour
        self._timeline = timeline
        self._turns = _Turns(like)

    def send(self, hidden: Tensor) -> None:
        """Hidden states [T, hidden] as what is queued here so far leaves them; they may be overwritten at once.

        What is queued here later waits for the stage after only if that has fallen behind by all buffers.
        """
        buffer = self._turns.next(self._timeline)[: len(hidden)]
        buffer.copy_(hidden)
        copied = self._timeline.mark()
        with self._timeline.sending():
            self._timeline.after(copied)
            self._neighbour.send(buffer)
            self._turns.used(self._timeline.mark())
