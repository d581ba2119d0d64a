"""How tokens get to experts on other ranks and back, on `torch.distributed`.

Gathering shows every rank the tokens of all replicas (they come back by reduce-scatter); all-to-all sends a token to
the ranks that have one of its experts. Of a team, whose ranks have the same tokens, each sends its share of them only:
no expert computes a row twice. Padded exchanges have sizes that follow from the number of tokens alone, so that no host
must ask where they go, and a graph may hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.models.moe import Routed, Trip
from engine.models.passing import Pending
from engine.parallel.layout import Held

NOBODY = -1
"""The pick of a row that is no token's, or of an expert that somebody else is asked for."""

T = TypeVar("T")

Run = Callable[[Callable[[], T]], Pending[T]]
"""Carries out an exchange: at once, or beside what is computed until its result is asked for."""


# torch 2.13 warns of the name that 2.11 has.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group(NamedTuple):
    """Some ranks, and which of them this one is."""

    rank: int
    size: int
    group: Any


class Ways(Protocol):
    """How rows get from rank to rank of a group, as many from each to each."""

    def gather(self, rows: Tensor) -> Tensor:
        """[n, width] of every rank, one below the other: [size * n, width], contiguous."""
        ...

    def scatter_sum(self, rows: Tensor) -> Tensor:
        """This rank's n rows of the sum over all ranks of [size * n, width]."""
        ...

    def swap(self, rows: Tensor) -> Tensor:
        """The rth n of [size * n, width] go to rank r, and come from it: [size * n, width]."""
        ...


class Distributed:
    """By `torch.distributed`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather(self, rows: Tensor) -> Tensor:
        pool = rows.new_empty(self._group.size * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(pool, rows, group=self._group.group)
        return pool

    def scatter_sum(self, rows: Tensor) -> Tensor:
        own = rows.new_empty(len(rows) // self._group.size, *rows.shape[1:])
        reduce_scatter(own, rows, group=self._group.group)
        return own

    def swap(self, rows: Tensor) -> Tensor:
        come = torch.empty_like(rows)
        dist.all_to_all_single(come, rows, group=self._group.group)
        return come


def at_once(exchange: Callable[[], T]) -> Pending[T]:
    """Wait for an exchange as soon as it begins."""
    result = exchange()
    return lambda: result


def in_line(run: Run[T]) -> Run[T]:
    """In order with what `run` carries out, and waited for as soon as it begins."""
    return lambda exchange: at_once(run(exchange))


def where(held: Held, experts: int, device: torch.device) -> Tensor:
    """Where each of the model's experts is in a rank's weights, -1: elsewhere; the last entry is `NOBODY`'s."""
    places = torch.full((experts + 1,), -1, dtype=torch.int32)
    places[held.experts.start : held.experts.stop] = torch.arange(len(held.experts), dtype=torch.int32)
    return places.to(device)


class Gathering:
    """Every rank sees the tokens of all replicas, and adds what its experts, or parts of them, give."""

    def __init__(self, replicas: Group, padded: bool, run: Run[Any] = at_once, ways: Ways | None = None) -> None:
        """`replicas`: the ranks with the same tensor-parallel rank and stage; `ways`: better ones."""
        self.replicas, self.fixed = replicas.size, True
        self._replicas, self._padded, self._run = replicas, padded, run
        self._ways = ways or Distributed(replicas)

    def of(self, tokens: Sequence[int], beside: bool) -> Trip:
        """For a pass of so many tokens on each replica, whose exchanges go on `beside` what is computed, or do not."""
        most, run = max(tokens), self._run if beside else in_line(self._run)
        even = self._padded or min(tokens) == most
        rows = [most] * len(tokens) if even else tokens
        return _GatheredTrip(self._replicas, rows, self._ways if even else None, run)


class _GatheredTrip:
    def __init__(self, replicas: Group, rows: Sequence[int], even: Ways | None, run: Run[Any]) -> None:
        """`even`: ways of as many rows of each rank."""
        self._replicas, self._even, self._run = replicas, even, run
        edges = list(accumulate(rows, initial=0))
        self._spans = [slice(start, end) for start, end in pairwise(edges)]
        self._rows, self._all, self._own = rows[replicas.rank], edges[-1], 0

    def go(self, routed: Routed) -> Pending[Routed]:
        self._own = len(routed.y)
        sent = _packed(_padded(routed, self._rows))
        arriving = self._run(lambda: self._gather(sent))
        return lambda: _unpacked(arriving(), routed)

    def come(self, sums: Tensor) -> Pending[Tensor]:
        returning = self._run(lambda: self._scatter(sums))
        return lambda: returning()[: self._own]

    def _gather(self, sent: Tensor) -> Tensor:
        if self._even is not None:
            return self._even.gather(sent)
        pool = sent.new_empty(self._all, sent.shape[1])
        pool[self._spans[self._replicas.rank]] = sent
        for rank, span in enumerate(self._spans):
            if span.stop > span.start:
                dist.broadcast(pool[span], group=self._replicas.group, group_src=rank)
        return pool

    def _scatter(self, sums: Tensor) -> Tensor:
        if self._even is not None:
            return self._even.scatter_sum(sums)
        for rank, span in enumerate(self._spans):
            if span.stop > span.start:
                dist.reduce(sums[span], group=self._replicas.group, group_dst=rank)
        return sums[self._spans[self._replicas.rank]]


class AllToAll:
    """A token goes to each rank that has one of its experts; every rank has whole ones."""

    def __init__(
        self,
        ranks: Group,
        team: int,
        experts: int,
        padded: bool,
        run: Run[Any] = at_once,
        ways: Ways | None = None,
    ) -> None:
        """`ranks`: all that share experts, of which `team` neighbours each have equal tokens; `ways`: better ones."""
        self._ways = ways or Distributed(ranks)
        self.replicas, self.fixed = ranks.size // team, padded
        self._ranks, self._team, self._padded, self._run = ranks, team, padded, run
        self._each = experts // ranks.size

    def of(self, tokens: Sequence[int], beside: bool) -> Trip:
        """As `Gathering.of`."""
        trip, run = _PaddedTrip if self._padded else _SortedTrip, self._run if beside else in_line(self._run)
        return trip(self._ranks, self._ways, self._team, self._each, -(-max(tokens) // self._team), run)


class _PaddedTrip:
    """Every rank has room for all tokens of every other."""

    def __init__(self, ranks: Group, ways: Ways, team: int, each: int, rows: int, run: Run[Any]) -> None:
        self._ranks, self._ways, self._each, self._rows, self._run = ranks, ways, each, rows, run
        self._begin = ranks.rank % team * rows
        self._tokens = 0

    def go(self, routed: Routed) -> Pending[Routed]:
        sent = _packed(self._addressed(routed)).view(self._ranks.size * self._rows, -1)
        arriving = self._run(lambda: self._ways.swap(sent))
        return lambda: _unpacked(arriving(), routed)

    def come(self, sums: Tensor) -> Pending[Tensor]:
        returning = self._run(lambda: self._ways.swap(sums))
        return lambda: self._placed(returning().view(self._ranks.size, self._rows, -1).sum(0))

    def _addressed(self, routed: Routed) -> Routed:
        """This rank's share of a team's tokens for each rank, with picks of its experts: [ranks, rows, ...]."""
        self._tokens = len(routed.y)
        own = _padded(Routed(*[part[self._begin : self._begin + self._rows] for part in routed]), self._rows)
        owners = torch.arange(self._ranks.size, device=own.picks.device)[:, None, None]
        meant = own.picks.div(self._each, rounding_mode="floor") == owners
        picks = own.picks.masked_fill(~meant, NOBODY)
        every = (self._ranks.size, -1, -1)
        return Routed(own.y.expand(every), own.shares.expand(every), picks)

    def _placed(self, sums: Tensor) -> Tensor:
        """Among zeros for those tokens that other ranks of the team have sent."""
        placed = sums.new_zeros(self._tokens, sums.shape[1])
        own = placed[self._begin : self._begin + self._rows]
        own.copy_(sums[: len(own)])
        return placed


class _SortedTrip(_PaddedTrip):
    """Only tokens that are meant travel; how many, the ranks tell one another first, through the host."""

    def go(self, routed: Routed) -> Pending[Routed]:
        addressed = self._addressed(routed)
        self._meant = (addressed.picks != NOBODY).any(-1)  # [ranks, rows]
        sent = _packed(Routed(*[part[self._meant] for part in addressed]))
        arriving = self._run(lambda: self._send(sent, self._meant.sum(1)))
        return lambda: _unpacked(arriving(), routed)

    def come(self, sums: Tensor) -> Pending[Tensor]:
        returning = self._run(lambda: self._exact(sums, self._to, self._from))
        return lambda: self._placed(self._added(returning()))

    def _send(self, sent: Tensor, counts: Tensor) -> Tensor:
        expected = torch.empty_like(counts)
        dist.all_to_all_single(expected, counts, group=self._ranks.group)
        self._from, self._to = counts.tolist(), expected.tolist()
        return self._exact(sent, self._from, self._to)

    def _exact(self, source: Tensor, going: list[int], coming: list[int]) -> Tensor:
        target = source.new_empty(sum(coming), source.shape[1])
        dist.all_to_all_single(target, source, coming, going, group=self._ranks.group)
        return target

    def _added(self, sums: Tensor) -> Tensor:
        """What came back for each token, in order of the ranks it comes from: the same bits every time."""
        apart = sums.new_zeros(*self._meant.shape, sums.shape[1])
        apart[self._meant] = sums
        return apart.sum(0)


def _padded(routed: Routed, rows: int) -> Routed:
    """With rows of nobody's up to so many."""
    more = rows - len(routed.y)
    if not more:
        return routed
    pad = (0, 0, 0, more)
    return Routed(F.pad(routed.y, pad), F.pad(routed.shares, pad), F.pad(routed.picks, pad, value=NOBODY))


def _packed(routed: Routed) -> Tensor:
    """All of a token's in one row of bytes: one exchange costs less than three."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in routed], -1)


def _unpacked(rows: Tensor, like: Routed) -> Routed:
    y, shares, picks = rows.split([part.shape[-1] * part.element_size() for part in like], 1)
    return Routed(
        y.contiguous().view(like.y.dtype),
        shares.contiguous().view(like.shares.dtype),
        picks.contiguous().view(like.picks.dtype),
    )
