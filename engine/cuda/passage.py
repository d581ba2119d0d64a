"""Hidden states on their way between stages of a pipeline, beside the computing: received ahead, and sent behind.

Graphs read and leave hidden states at fixed places, which the exchange must not wait for: what arrives, and what
leaves, lies in buffers of its own, used by turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.cuda.timeline import Mark, Timeline
from engine.models.decoder import Neighbour

TURNS = 2
"""Buffers on either side: one on its way while the other is filled or read. Two stages have four between them."""


class _Turns:
    """Buffers that are used one after another, each when its last use is over."""

    def __init__(self, like: Tensor, count: int) -> None:
        self._buffers = [torch.zeros_like(like) for _ in range(count)]
        self._over: list[Mark | None] = [None] * count
        self._turn = 0

    def next(self, timeline: Timeline) -> tuple[int, Tensor]:
        """The next buffer and its number; what is queued here from now on comes after its last use."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if (over := self._over[self._turn]) is not None:
            timeline.after(over)
        return self._turn, self._buffers[self._turn]

    def used(self, turn: int, over: Mark) -> None:
        """A buffer is free when this is passed."""
        self._over[turn] = over


class Arriving(NamedTuple):
    """Rows on their way."""

    turn: int
    rows: Tensor
    arrived: Mark


class Arrivals:
    """What another stage sends, in order of sending. `like`: the largest message; `turns`: buffers."""

    def __init__(self, neighbour: Neighbour, like: Tensor, timeline: Timeline, turns: int) -> None:
        self._neighbour = neighbour
        self._timeline = timeline
        self._turns = _Turns(like, turns)

    def begin(self, rows: int) -> Arriving:
        """Receive so many rows as soon as they are sent and a buffer is free, whatever has been queued here before."""
        with self._timeline.receiving():
            turn, buffer = self._turns.next(self._timeline)
            received = self._neighbour.receive(buffer[:rows])
            return Arriving(turn, received, self._timeline.mark())

    def read(self, arriving: Arriving) -> Tensor:
        """The rows, for what is queued here from now on, until `over`."""
        self._timeline.after(arriving.arrived)
        return arriving.rows

    def over(self, arriving: Arriving) -> None:
        """What is queued here later reads the rows no more."""
        self._turns.used(arriving.turn, self._timeline.mark())


class Inlet:
    """Where the stage before sends to. `like`: [most tokens of a step, hidden]."""

    def __init__(self, neighbour: Neighbour, like: Tensor, timeline: Timeline) -> None:
        self.hidden = torch.zeros_like(like)
        """Hidden states of the step that is computed: its first rows, which it may overwrite."""
        self._arrivals = Arrivals(neighbour, like, timeline, TURNS)

    def receive(self, tokens: int) -> None:
        """Hidden states of a step's tokens for what is queued here from now on."""
        arriving = self._arrivals.begin(tokens)
        self.hidden[:tokens].copy_(self._arrivals.read(arriving))
        self._arrivals.over(arriving)


class Outlet:
    """What another stage receives. `like`: the largest message; `turns`: buffers."""

    def __init__(self, neighbour: Neighbour, like: Tensor, timeline: Timeline, turns: int = TURNS) -> None:
        self._neighbour = neighbour
        self._timeline = timeline
        self._turns = _Turns(like, turns)

    def send(self, rows: Tensor) -> None:
        """Rows as what is queued here so far leaves them; they may be overwritten at once.

        What is queued here later waits for the receiver only if that has fallen behind by all buffers.
        """
        turn, buffer = self._turns.next(self._timeline)
        message = buffer[: len(rows)]
        message.copy_(rows)
        copied = self._timeline.mark()
        with self._timeline.sending():
            self._timeline.after(copied)
            self._neighbour.send(message)
            self._turns.used(turn, self._timeline.mark())
