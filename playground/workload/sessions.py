"""From the rows of an agent trace to sessions that can be started at any time, any number of times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from numpy.random import Generator

from playground.core import Request
from playground.workload.rows import Row
from playground.workload.source import Session


@dataclass(frozen=True, slots=True)
class Calls:
    """One recorded session: its calls, and the seconds between the end of each and the arrival of the next."""

    rows: tuple[Row, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SessionRows:
    """All sessions of a trace. `shared` holds the prefix ids that more than one of them has."""

    sessions: tuple[Calls, ...]
    shared: frozenset[int]
    ids: int
    """Prefix ids lie below this number."""

    @classmethod
    def group(cls, rows: Iterable[Row]) -> SessionRows:
        """Sessions in order of their first row; a row without a session is one by itself."""
        groups: dict[str, list[Row]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(row.session or f"#{number}", []).append(row)
        owners = Counter(block for group in groups.values() for block in {b for row in group for b in row.hashes})
        shared = frozenset(block for block, count in owners.items() if count > 1)
        sessions = tuple(Calls(tuple(group), _gaps(group)) for group in groups.values())
        return cls(sessions, shared, max(owners, default=-1) + 1)

    def choose(self, rng: Generator, count: int | None) -> list[Calls]:
        """So many sessions in random order; each recorded one is used once before any is used again."""
        return list(islice(self._endless(rng), len(self.sessions) if count is None else count))

    def _endless(self, rng: Generator) -> Iterator[Calls]:
        copy = 0
        while self.sessions:
            for index in rng.permutation(len(self.sessions)).tolist():
                yield self._copied(self.sessions[index], copy)
            copy += 1

    def _copied(self, calls: Calls, copy: int) -> Calls:
        """A copy has contents of its own: it must not find what it never computed in the prefix cache."""
        if copy == 0:
            return calls
        return Calls(tuple(self._renamed(row, copy) for row in calls.rows), calls.gaps)

    def _renamed(self, row: Row, copy: int) -> Row:
        hashes = tuple(b if b in self.shared else b + copy * self.ids for b in row.hashes)
        return row._replace(hashes=hashes, session=f"{row.session}#{copy}")


def draw_sessions(
    chosen: Iterable[Calls], starts: Iterator[float], to_requests: Callable[[Iterable[Row]], Iterator[Request]]
) -> list[Session]:
    """The sessions, started at these times; requests are numbered session by session."""
    sessions = list(chosen)
    requests = to_requests(row for calls in sessions for row in calls.rows)
    return [Session(next(starts), tuple(islice(requests, len(calls.rows))), calls.gaps) for calls in sessions]


def _gaps(rows: list[Row]) -> tuple[float, ...]:
    return tuple(_gap(before, after) for before, after in pairwise(rows))


def _gap(before: Row, after: Row) -> float:
    """Stated, or else between the two arrivals: then the first call's latency is in it."""
    if after.gap is not None:
        return after.gap
    if before.arrival is None or after.arrival is None:
        return 0.0
    return max(0.0, after.arrival - before.arrival)
