"""How ranks speak to one another in the middle of a forward pass: on `torch.distributed`, over Gloo or NCCL."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.decoder import Part
from engine.parallel.layout import Layout, Place


class Team:
    """The tensor-parallel ranks of one stage."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        """The sum over all ranks, in place."""
        dist.all_reduce(x, group=self._group)

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side, [rows, size * width], the same on all of them."""
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=self._group)
        return parts.transpose(0, 1).flatten(1)  # of no rows, too


class Neighbour:
    """The stage before or after, as seen from one rank; what is sent comes in the same order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def receive(self, like: Tensor) -> Tensor:
        """Fill a tensor with what that stage sent."""
        dist.recv(like, self._rank)
        return like

    def send(self, x: Tensor) -> None:
        """On its way when this returns: a stage does not wait for the next one to be ready."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((dist.isend(x, self._rank), x))


def join(layout: Layout, rank: int, method: str, device: torch.device, patience: float) -> Part:
    """Meet all other ranks at `method` (tcp://HOST:PORT or file://PATH), and know those that a pass speaks to.

    `patience`: seconds after which a rank that does not answer is an error.
    """
    place = layout.place(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=method, rank=rank, world_size=layout.ranks, timeout=timedelta(seconds=patience)
    )
    return Part(
        first=place.stage == 0,
        last=place.stage == layout.stages - 1,
        team=_team(layout, place),
        before=_neighbour(layout, place, -1),
        after=_neighbour(layout, place, 1),
    )


def leave() -> None:
    """Say goodbye; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _team(layout: Layout, place: Place) -> Team | None:
    if layout.tp == 1:
        return None
    mine = None
    for replica in range(layout.replicas):
        for stage in range(layout.stages):  # everybody makes every group, in the same order
            ranks = [layout.rank(Place(replica, stage, tp_rank)) for tp_rank in range(layout.tp)]
            group = dist.new_group(ranks)
            if (replica, stage) == (place.replica, place.stage):
                mine = group
    return Team(place.tp_rank, layout.tp, mine)


def _neighbour(layout: Layout, place: Place, step: int) -> Neighbour | None:
    stage = place.stage + step
    return Neighbour(layout.rank(place._replace(stage=stage))) if 0 <= stage < layout.stages else None
