"""Requests made up from distributions: lengths, shared prefixes, tenants, priorities. Knows no arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as counter

from numpy.random import Generator

from playground.workload.arrivals import CHUNK
from playground.workload.errors import WorkloadError, check_count
from playground.workload.lengths import Ints, Lengths
from playground.workload.rows import Row


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prompts of a group begin with the same tokens (a system prompt, a document).

    Each request belongs to one of `groups`, all equally likely, and its prompt is the group's prefix of `length`
    tokens with a drawn length after it. Prefix ids stand for `block` tokens each.
    """

    groups: int
    length: int
    block: int = 16

    def __post_init__(self) -> None:
        check_count("workload.prefixes.groups", self.groups)
        check_count("workload.prefixes.length", self.length)
        check_count("workload.prefixes.block", self.block)
        if self.length < self.block:
            raise WorkloadError(
                f"workload.prefixes.length={self.length} must be at least workload.prefixes.block={self.block}"
            )

    @property
    def blocks(self) -> int:
        """Full blocks of a prefix."""
        return self.length // self.block

    def shared(self, group: int) -> tuple[int, ...]:
        """Prefix ids of a group's blocks."""
        return tuple(range(group * self.blocks, (group + 1) * self.blocks))


def synthesize(
    rng: Generator,
    count: int,
    lengths: Lengths,
    prefixes: Prefixes | None,
    tenants: int,
    priorities: int,
    private: Iterator[int],
) -> Iterator[Row]:
    """So many rows without arrivals; `tenants` and `priorities` are how many of each there are, all equally likely.

    `private` gives ids to blocks that nobody shares; no two calls for one workload may be given the same ones.
    """
    prompts, outputs = lengths.draw(rng, count)
    rows: Iterator[Row] = (Row(None, *lengths) for lengths in zip(_numbers(prompts), _numbers(outputs), strict=True))
    if prefixes:
        rows = _prefixed(rows, prefixes, rng.integers(prefixes.groups, size=count).tolist(), private)
    if tenants > 1:
        names = (f"tenant-{number}" for number in rng.integers(tenants, size=count).tolist())
        rows = (row._replace(tenant=name) for row, name in zip(rows, names, strict=True))
    if priorities > 1:
        levels = rng.integers(priorities, size=count).tolist()
        rows = (row._replace(priority=level) for row, level in zip(rows, levels, strict=True))
    return rows


def _numbers(values: Ints) -> Iterator[int]:
    """Python's, which take ten times the memory of NumPy's: not of all at once."""
    for first in range(0, len(values), CHUNK):
        yield from values[first : first + CHUNK].tolist()


def private_ids(prefixes: Prefixes | None) -> Iterator[int]:
    """Ids that no shared block has."""
    return counter(prefixes.groups * prefixes.blocks if prefixes else 0)


def _prefixed(rows: Iterator[Row], prefixes: Prefixes, groups: list[int], private: Iterator[int]) -> Iterator[Row]:
    """Behind the prefix every block is nobody else's."""
    for row, group in zip(rows, groups, strict=True):
        length = prefixes.length + row.prompt_length
        own = length // prefixes.block - prefixes.blocks
        hashes = prefixes.shared(group) + tuple(next(private) for _ in range(own))
        yield row._replace(prompt_length=length, hashes=hashes, hash_block=prefixes.block)
