"""How GPUs of a pipeline's stages send hidden states: over NCCL, or through a ring in one another's memory.

Both do what they are told on the current stream, and hold up no host: who is to compute meanwhile calls them on a
stream of its own (`passage`). What is sent comes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.decoder import Neighbour
from engine.parallel.layout import Layout
from engine.parallel.peers import Ring

CTAS = 4
"""The most blocks of threads that an exchange over NCCL keeps: those that wait for their partner take them from the
computing beside them. A guess, not measured; each moves some 20 GB/s over NVLink."""

PIECE = 8 << 20
"""Bytes of a slot of a ring: what is larger is sent in pieces."""


def neighbours(
    layout: Layout, rank: int, device: torch.device, patience: float, shared: bool
) -> tuple[Neighbour | None, Neighbour | None, Neighbour | None]:
    """The stages before and after, and the one at the other end, as in `Part`.

    All ranks call this at once, for they make all groups together.

    `patience`: seconds after which a rank that does not answer is an error. `shared`: ranks may sit on one GPU, which
    NCCL refuses: they meet in its memory.
    """
    before: Neighbour | None = None
    after: Neighbour | None = None
    back: Neighbour | None = None
    options = {"backend": "gloo"} if shared else _nccl()
    for giver, taker in _edges(layout):
        group = dist.new_group([giver, taker], timedelta(seconds=patience), **options)
        if rank not in (giver, taker):
            continue
        gives, other = rank == giver, giver + taker - rank
        link = Adjoining(Ring(group, int(not gives), device, PIECE)) if shared else Distant(other, gives, group, device)
        if giver > taker:
            back = link
        elif gives:
            after = link
        else:
            before = link
    return before, after, back


def _edges(layout: Layout) -> Iterator[tuple[int, int]]:
    """Ranks that send and those that they send to, in the order in which all meet: no two wait for one another.

    Those that send back, from the last stage to the first, come at the end.
    """
    places = [layout.place(rank) for rank in range(layout.ranks)]
    for rank, place in enumerate(places):
        if place.stage < layout.stages - 1:
            yield rank, layout.rank(place._replace(stage=place.stage + 1))
    for rank, place in enumerate(places):
        if place.stage and place.stage == layout.stages - 1:
            yield rank, layout.rank(place._replace(stage=0))


def _nccl() -> dict[str, Any]:
    """A communicator with few blocks of threads, which come before those that compute."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = CTAS
    return {"backend": "nccl", "pg_options": options}


class Distant:
    """Over NCCL, in a group of two."""

    def __init__(self, other: int, gives: bool, group: Any, device: torch.device) -> None:
        """Both ranks at once: the communicator is opened here, for its first use holds up the host."""
        self._other = other
        self._group = group
        met = torch.zeros(1, device=device)
        if gives:
            self.send(met)
        else:
            self.receive(met)
        torch.cuda.synchronize(device)

    def receive(self, like: Tensor) -> Tensor:
        """Fill a contiguous tensor with what is sent."""
        dist.recv(like, self._other, group=self._group)
        return like

    def send(self, x: Tensor) -> None:
        """x, contiguous, may be overwritten by what follows on the stream."""
        dist.send(x, self._other, group=self._group)


class Adjoining:
    """Through a ring in the taker's memory. Messages of more than a slot go in pieces, cut by rows."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def receive(self, like: Tensor) -> Tensor:
        """Fill a contiguous tensor [T, width] with what is sent."""
        for piece in _pieces(like):
            self._ring.take(piece)
        return like

    def send(self, x: Tensor) -> None:
        """x [T, width], contiguous, may be overwritten by what follows on the stream."""
        for piece in _pieces(x):
            self._ring.put(piece)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """As both ends cut it."""
    return x.split(max(PIECE // (x.shape[1] * x.element_size()), 1))
