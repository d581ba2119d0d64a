"""How ranks speak to one another in the middle of a forward pass: on `torch.distributed`, over Gloo or NCCL."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.decoder import Exchange, Part
from engine.models.decoder import Neighbour as AnyNeighbour
from engine.models.decoder import Team as AnyTeam
from engine.models.passing import Pending
from engine.overlap import NONE, Overlap
from engine.parallel.beside import beside
from engine.parallel.exchange import AllToAll, Distributed, Gathering, Group, Run, at_once, where
from engine.parallel.layout import Layout, Place

RETURNS = 1
"""The tag of tokens that go back to the first stage: layers that move the same way must not be taken for them."""


class Team:
    """The tensor-parallel ranks of one stage."""

    def __init__(self, rank: int, size: int, group: Any, run: Run[Any] = at_once) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._run = run

    def add_sum(self, partial: Tensor, x: Tensor) -> Pending[Tensor]:
        """x + the sum of all ranks' partials, both [T, hidden]; overwrites both, and gives x."""
        summing = self._run(lambda: self._reduced(partial))
        return lambda: x.add_(summing())

    def sum(self, x: Tensor) -> None:
        """Over all ranks, in place."""
        self._run(lambda: self._reduced(x))()

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side, [rows, size * width], the same on all of them."""
        own, parts = x.contiguous(), x.new_empty(self.size, *x.shape)
        self._run(lambda: dist.all_gather(list(parts.unbind(0)), own, group=self._group))()
        return parts.transpose(0, 1).flatten(1)  # of no rows, too

    def _reduced(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x


class Neighbour:
    """Another stage, as seen from one rank; what is sent with one tag comes in the same order."""

    def __init__(self, rank: int, tag: int = 0) -> None:
        self._rank = rank
        self._tag = tag
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def receive(self, like: Tensor) -> Tensor:
        """Fill a tensor with what that stage sent."""
        dist.recv(like, self._rank, tag=self._tag)
        return like

    def send(self, x: Tensor) -> None:
        """On its way when this returns: a stage does not wait for the next one to be ready."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((dist.isend(x, self._rank, tag=self._tag), x))


def join(
    layout: Layout,
    rank: int,
    method: str,
    device: torch.device,
    patience: float,
    experts: int | None = None,
    overlap: Overlap = NONE,
    near: bool = False,
    share_gpus: bool = False,
) -> Part:
    """Meet all other ranks at `method` (tcp://HOST:PORT or file://PATH), and know those that a pass speaks to.

    `patience`: seconds after which a rank that does not answer is an error. `experts`: how many the model has.
    `near`: all ranks are on GPUs of one host, which see one another's memory. `share_gpus`: several ranks may be on one
    GPU, where NCCL refuses to work.
    """
    place = layout.place(rank)
    backend = "nccl" if device.type == "cuda" and not share_gpus else "gloo"
    dist.init_process_group(
        backend, init_method=method, rank=rank, world_size=layout.ranks, timeout=timedelta(seconds=patience)
    )
    run = at_once if overlap == NONE else beside(device)
    team: AnyTeam | None = _team(layout, place, run)
    if near and team is not None:
        from engine.cuda.team import near_team

        team = near_team(_among(layout, place, _teams(layout), "gloo"), team, run, device, share_gpus)
    held = where(layout.held(place, experts), experts, device) if experts else None
    exchange = _exchange(layout, place, experts, device, run, near, share_gpus) if experts else None
    before, after, back = _neighbours(layout, rank, device, patience, share_gpus)
    return Part(
        first=place.stage == 0,
        last=place.stage == layout.stages - 1,
        stages=layout.stages,
        team=team,
        exchange=exchange,
        held=held,
        before=before,
        after=after,
        back=back,
        overlap=overlap,
    )


def leave() -> None:
    """Say goodbye; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _team(layout: Layout, place: Place, run: Run[Any]) -> Team | None:
    return None if layout.tp == 1 else Team(*_among(layout, place, _teams(layout)), run)


def _teams(layout: Layout) -> list[list[Place]]:
    return [
        [Place(replica, stage, tp_rank) for tp_rank in range(layout.tp)]
        for replica in range(layout.replicas)
        for stage in range(layout.stages)
    ]


def _exchange(
    layout: Layout, place: Place, experts: int, device: torch.device, run: Run[Any], near: bool, share_gpus: bool
) -> Exchange | None:
    """None: a team's ranks have all of their tokens, and nobody else's."""
    to_all = layout.exchange.endswith("all_to_all")
    if not to_all and not layout.lockstep:
        return None
    padded = layout.exchange.startswith("padded")
    teams = _sharing(layout) if to_all else _alike(layout)
    group, ways = _among(layout, place, teams), None
    if near:
        from engine.cuda.team import near_ways

        ways = near_ways(_among(layout, place, teams, "gloo"), Distributed(group), device, share_gpus)
    if to_all:
        return AllToAll(group, layout.tp, experts, padded, run, ways)
    return Gathering(group, padded, run, ways)


def _sharing(layout: Layout) -> list[list[Place]]:
    """Ranks that share experts."""
    replicas, tp_ranks = range(layout.replicas), range(layout.tp)
    if layout.lockstep:
        return [[Place(r, stage, t) for r in replicas for t in tp_ranks] for stage in range(layout.stages)]
    return [[Place(r, stage, t) for t in tp_ranks] for r in replicas for stage in range(layout.stages)]


def _alike(layout: Layout) -> list[list[Place]]:
    """Of each replica one rank, all with the same share of its layers."""
    replicas, tp_ranks = range(layout.replicas), range(layout.tp)
    return [[Place(r, stage, t) for r in replicas] for stage in range(layout.stages) for t in tp_ranks]


def _among(layout: Layout, place: Place, teams: list[list[Place]], backend: str | None = None) -> Group:
    """The team of several in which a place is; everybody makes every group, in the same order."""
    mine = None
    for team in teams:
        group = dist.new_group([layout.rank(one) for one in team], backend=backend)
        if place in team:
            mine = Group(team.index(place), len(team), group)
    assert mine is not None
    return mine


def _neighbours(
    layout: Layout, rank: int, device: torch.device, patience: float, share_gpus: bool
) -> tuple[AnyNeighbour | None, AnyNeighbour | None, AnyNeighbour | None]:
    """The stages before and after, and the one at the other end, see `Part`."""
    if device.type == "cuda":
        from engine.cuda.neighbour import neighbours

        return neighbours(layout, rank, device, patience, share_gpus)
    place, last = layout.place(rank), layout.stages - 1
    stages = (place.stage - 1, place.stage + 1)
    before, after = (
        Neighbour(layout.rank(place._replace(stage=stage))) if 0 <= stage <= last else None for stage in stages
    )
    if last == 0 or 0 < place.stage < last:
        return before, after, None
    return before, after, Neighbour(layout.rank(place._replace(stage=last - place.stage)), RETURNS)
