"""How long devices take to exchange data: one formula for each algorithm, from the figures of links.

Sizes are in bytes, times in seconds. Every answer is apart by what it does to others: latency, in which the links are
free, and time on the wire, which those who share a port share. Ring and tree are NCCL's own model (`tuning.cc`:
latencies by number of hops, traffic by algorithm), one-shot and two-shot are vLLM's custom all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from playground.sim.links import ISLAND, Links

TREE_EFFICIENCY = 0.92
"""Of the bandwidth of a ring: NCCL's factor for its trees."""
PAIRS = 1.3e-6
"""Seconds that a group of sends and receives takes more than a collective to start (NCCL 2.29 on H200)."""
BUFFERED = 8e-6
"""Seconds that large parts take more, which go through NCCL's buffers (its Simple protocol)."""
BUFFERED_FROM = 16384
"""Bytes to one receiver up to which NCCL sends words with flags instead (LL): `P2P_LL_THRESHOLD` in its `enqueue.cc`.
Half of `BUFFERED` is taken here, since channels cross it one after another."""


class Exchange(NamedTuple):
    """Seconds of one exchange: before and between bytes, and on the busiest port."""

    latency: float
    wire: float

    @property
    def time(self) -> float:
        return self.latency + self.wire

    def times(self, count: float) -> Exchange:
        """So many of them, one after another."""
        return Exchange(self.latency * count, self.wire * count)

    def plus(self, other: Exchange) -> Exchange:
        return Exchange(self.latency + other.latency, self.wire + other.wire)


NONE = Exchange(0.0, 0.0)
"""Nobody to talk to."""


@dataclass(frozen=True, slots=True)
class Team:
    """Devices that exchange data: `local` of them on each of `hosts` hosts."""

    links: Links
    hosts: int
    local: int

    @classmethod
    def of(cls, links: Links, ranks: int, option: str) -> Team:
        """Of neighbouring devices; `option` says in an error where the number comes from."""
        size = links.devices_per_host
        if ranks <= size:
            if size % ranks and size < ISLAND:
                raise ValueError(
                    f"{option}: {ranks} devices must divide links.devices_per_host={size}, or be a multiple of it: "
                    "each host must hold equally many"
                )
            return cls(links, 1, ranks)
        if ranks % size:
            raise ValueError(
                f"{option}: {ranks} devices must be a multiple of links.devices_per_host={size}: "
                "each host must hold equally many"
            )
        if links.across is None:
            raise ValueError(
                f"{option}: {ranks} devices need more than one host of {size}, and links={links.name} has no link "
                "between hosts: lower it, or choose links with one (links.across)"
            )
        return cls(links, ranks // size, size)

    @property
    def ranks(self) -> int:
        return self.hosts * self.local

    @property
    def _within(self) -> float:
        """Bytes/s of one member to a neighbour on its host, while all members talk."""
        link = self.links.within
        return link.rate / min(self.local, link.shared_by)

    @property
    def _rate(self) -> float:
        """Bytes/s around a ring: with several hosts one ring runs through each of their ports, all at once."""
        across = self.links.across
        if self.hosts == 1 or across is None:
            return self._within
        ports = -(-self.local // across.shared_by)
        return min(across.rate * ports, self.links.within.rate)

    @property
    def _across_latency(self) -> float:
        across = self.links.across
        return across.latency if across and self.hosts > 1 else 0.0

    def _ring_latency(self, passes: int) -> float:
        """Of so many times round: each crosses every host's border but one on its critical path."""
        crossings = passes * (self.hosts - 1)
        hops = passes * (self.ranks - 1) - crossings
        return self.links.start + hops * self.links.within.latency + crossings * self._across_latency

    def all_reduce(self, size: float) -> Exchange:
        """Everyone ends with the sum of everyone's `size` bytes."""
        if self.ranks == 1:
            return NONE
        algorithm = self.links.all_reduce
        if algorithm == "auto":
            return min(self._candidates(size), key=_time)
        if algorithm == "tree":
            return self._tree(size)
        if algorithm == "ring" or self.hosts > 1:  # other hosts' memory cannot be read
            return self._ring(size)
        return self._one_shot(size) if algorithm == "one_shot" else self._two_shot(size)

    def _candidates(self, size: float) -> list[Exchange]:
        found = [self._ring(size), self._tree(size)]
        if self.links.direct and self.hosts == 1:
            found += [self._one_shot(size), self._two_shot(size)]
        return found

    def _ring(self, size: float) -> Exchange:
        share = 2 * (self.ranks - 1) / self.ranks
        return Exchange(self._ring_latency(2), share * size / self._rate)

    def _tree(self, size: float) -> Exchange:
        """Up and down: a chain within each host, a binary tree over the hosts. Every byte leaves a port twice."""
        links, depth = self.links, log2(self.hosts)
        latency = 2 * ((self.local - 1) * links.within.latency + depth * self._across_latency)
        return Exchange(links.start + latency, 2 * size / (self._rate * TREE_EFFICIENCY))

    def _one_shot(self, size: float) -> Exchange:
        """Everyone reads everything of everyone."""
        return Exchange(self.links.start + self.links.within.latency, (self.ranks - 1) * size / self._within)

    def _two_shot(self, size: float) -> Exchange:
        """Everyone reads its share of everyone, then everyone's sum: the traffic of a ring in two hops."""
        wire = 2 * (self.ranks - 1) / self.ranks * size / self._within
        return Exchange(self.links.start + 2 * self.links.within.latency, wire)

    def all_gather(self, size: float) -> Exchange:
        """Everyone ends with `size` bytes, of which it had its share (a reduce-scatter takes as long)."""
        if self.ranks == 1:
            return NONE
        return Exchange(self._ring_latency(1), (self.ranks - 1) / self.ranks * size / self._rate)

    def all_to_all(self, size: float) -> Exchange:
        """Everyone sends `size` bytes in all, an equal part to each of the others: all pairs at the same time."""
        if self.ranks == 1:
            return NONE
        others, links = self.ranks - 1, self.links
        part = size / others
        wire = part * (self.local - 1) / self._within
        latency = links.start + links.within.latency
        if self.hosts > 1 and links.across:
            sharers = min(self.local, links.across.shared_by)
            wire = max(wire, part * (self.ranks - self.local) * sharers / links.across.rate)
            latency = links.start + max(links.within.latency, links.across.latency)
        return Exchange(latency + PAIRS + BUFFERED * part / (part + BUFFERED_FROM), wire)


def _time(exchange: Exchange) -> float:
    return exchange.time
