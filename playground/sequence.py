"""A sequence: a request that the scheduler has taken in, and the counters that say how far it is.

It knows no queue, no policy and no device.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from playground.core import Request, RequestView


class State(Enum):
    """Where a sequence stands.

    WAITING: holds no KV. RUNNING: admitted. DRAINING: given up by a policy or its client while slices of it are in
    flight; it holds its blocks until the last of them commits. SWAPPED: its KV lies in the host's pool.
    COPYING: its KV is on the way. ENDED: has its last token (blocks may still be held by slices in flight).
    """

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    SWAPPED = "swapped"
    COPYING = "copying"
    ENDED = "ended"


class Sequence:
    """Counters of one request, in tokens; scheduler-owned, read-only to everybody else.

    `launched`: tokens of this epoch whose KV has been asked for (or found in the prefix cache). `promised`: tokens
    that slices launched so far will sample, an upper bound. `returned`: sampled tokens that came back. A new epoch
    begins when the KV is lost or moves.

    Law: 0 <= launched <= prompt + promised, 0 <= returned <= promised <= max_tokens.
    """

    __slots__ = (
        "admitted",
        "blocks",
        "cached_tokens",
        "epoch",
        "first_token",
        "host_blocks",
        "id",
        "in_flight",
        "keys",
        "launched",
        "length",
        "max_tokens",
        "placed_epoch",
        "preemptions",
        "promised",
        "published",
        "rank",
        "recomputed",
        "request",
        "returned",
        "state",
        "step",
        "target",
    )

    def __init__(self, request: Request, rank: int) -> None:
        self.id = request.id
        self.request: RequestView = request.view()
        self.rank = rank
        self.max_tokens = request.max_tokens
        self.length = request.prompt_length
        """Tokens known or promised: the prompt and everything sampled so far."""
        self.state = State.WAITING
        self.epoch = 0
        self.launched = 0
        self.promised = 0
        self.returned = 0
        self.in_flight = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.keys: tuple[Hashable, ...] = ()
        """Prefix-cache keys of the prompt's full blocks."""
        self.published = 0
        """How many of `blocks` are findable, or were when they were taken."""
        self.target = 0
        """Up to where KV was computed before the last preemption: tokens below it are computed again."""
        self.preemptions = 0
        self.recomputed = 0
        self.cached_tokens = 0
        self.step = 0
        """Which step of its group its last slice went into, counted from 1."""
        self.placed_epoch: int | None = None
        """The epoch whose whole block table a slice has carried."""
        self.admitted: float | None = None
        self.first_token: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be asked for before the next one can be sampled."""
        return self.length - self.launched

    @property
    def decoding(self) -> bool:
        """Its next slice is one token long and follows a sampled one."""
        return self.promised > 0 and self.length - self.launched == 1

    @property
    def max_length(self) -> int:
        """Tokens of KV it can ever hold: the last sampled token needs none."""
        return self.request.prompt_length + self.max_tokens - 1

    def check(self) -> None:
        """The law; `AssertionError` names the sequence."""
        assert self.length == self.request.prompt_length + self.promised, f"sequence {self.id}: length"
        assert 0 <= self.launched <= self.length, f"sequence {self.id}: launched {self.launched} of {self.length}"
        assert 0 <= self.returned <= self.promised <= self.max_tokens, f"sequence {self.id}: promises"
        assert self.in_flight >= 0, f"sequence {self.id}: in_flight {self.in_flight}"

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.state.value}, launched={self.launched}/{self.length}, "
            f"returned={self.returned}/{self.max_tokens}, in_flight={self.in_flight}, blocks={len(self.blocks)})"
        )
