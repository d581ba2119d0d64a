"""Ranks on GPUs of one host: small messages go by peer loads, several times faster than by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import Team
from engine.models.passing import Pending
from engine.parallel.exchange import Group, Run, Ways
from engine.parallel.peers import Peers

CAPACITY = 4 << 20
"""Bytes that a rank gives at most: up to there NCCL takes the same 42 microseconds however little it is."""

SHARED_CAPACITY = 64 << 20
"""Where NCCL refuses to work the rest goes through the host, which no graph can hold."""


class NearTeam:
    """What fits goes by `peers`, the rest by `far`; all by `run`, as of the other one."""

    def __init__(self, peers: Peers, far: Team, run: Run[Any]) -> None:
        self.rank, self.size = far.rank, far.size
        self._peers = peers
        self._far = far
        self._run = run

    def add_sum(self, partial: Tensor, x: Tensor) -> Pending[Tensor]:
        """x + the sum of all ranks' partials, both [T, hidden]; overwrites both, and gives x."""
        if not self._peers.fits(partial.nbytes):
            return self._far.add_sum(partial, x)
        return self._run(lambda: self._added(partial, x))

    def sum(self, x: Tensor) -> None:
        """Over all ranks, in place."""
        if self._peers.fits(x.nbytes):
            partial = x.clone()
            self._run(lambda: self._added(partial, x.zero_()))()
        else:
            self._far.sum(x)

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side, [rows, size * width], the same on all of them."""
        if not self._peers.fits(x.nbytes):
            return self._far.gather(x)
        own = x.contiguous()
        gathered: Tensor = self._run(lambda: self._peers.gather(own))()
        return gathered

    def _added(self, partial: Tensor, x: Tensor) -> Tensor:
        self._peers.add_sum(partial, x)
        return x


class NearWays:
    """Of rows to experts and back: what fits goes by `peers`, the rest by `far`."""

    def __init__(self, peers: Peers, far: Ways, shared: bool) -> None:
        """`shared`: `far` cannot swap."""
        self._peers, self._far, self._shared = peers, far, shared

    def gather(self, rows: Tensor) -> Tensor:
        if not self._peers.fits(rows.nbytes):
            return self._far.gather(rows)
        return self._peers.gather_rows(rows)

    def scatter_sum(self, rows: Tensor) -> Tensor:
        if not self._peers.fits(rows.nbytes):
            return self._far.scatter_sum(rows)
        return self._peers.scatter_sum(rows)

    def swap(self, rows: Tensor) -> Tensor:
        if not self._shared:
            return self._far.swap(rows)
        size, rank = self._peers.size, self._peers.rank
        everything = self._peers.gather_rows(rows).view(size, size, -1, rows.shape[1])
        return everything[:, rank].flatten(0, 1)


def near_ways(circle: Group, far: Ways, device: torch.device, shared: bool) -> NearWays:
    """All ranks of a group at once. `circle`: theirs, over Gloo; `shared`: they may be on one GPU."""
    return NearWays(_peers(circle, device, shared), far, shared)


def near_team(circle: Group, far: Team, run: Run[Any], device: torch.device, shared: bool) -> NearTeam:
    """The same of a team."""
    return NearTeam(_peers(circle, device, shared), far, run)


def _peers(circle: Group, device: torch.device, shared: bool) -> Peers:
    rank, size, group = circle
    return Peers(group, rank, size, device, SHARED_CAPACITY if shared else CAPACITY)


def in_reach(devices: Sequence[int]) -> bool:
    """Whether GPUs see one another's memory."""
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in permutations(set(devices), 2))
