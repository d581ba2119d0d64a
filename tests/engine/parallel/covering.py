"""All pairs of choices in few cases: most errors need no more than two choices to meet."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations

Row = Mapping[str, Hashable]
Met = tuple[Hashable, ...]


def covering(rows: Sequence[Row], apart: Collection[frozenset[str]] = ()) -> list[int]:
    """Places of rows in which every pair of values occurs that occurs in any row; the same ones at every call.

    Greedy: the row with most new pairs, of equal ones the first. Two columns of `apart` need not meet. All rows have
    the same columns.
    """
    columns = [(name,) for name in rows[0]]
    columns += [both for both in combinations(rows[0], 2) if frozenset(both) not in apart]
    met = [meetings(row, columns) for row in rows]
    left = set().union(*met)
    # A row never gains new pairs, so an old count is a bound, and most rows are never looked at again.
    heap = [(-len(found), place) for place, found in enumerate(met)]
    heapify(heap)
    chosen = []
    while left:
        _, place = heappop(heap)
        new = met[place] & left
        if heap and (-len(new), place) > heap[0]:
            heappush(heap, (-len(new), place))
            continue
        chosen.append(place)
        left -= new
    return chosen


def meetings(row: Row, columns: Sequence[tuple[str, ...]]) -> set[Met]:
    """What a row has in these columns and pairs of columns, with their names."""
    return {(names, *[row[name] for name in names]) for names in columns}
