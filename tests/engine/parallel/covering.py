"""All pairs of choices in few cases: most errors need no more than two choices to meet."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations

import numpy as np

Row = Mapping[str, Hashable]


def covering(rows: Sequence[Row], apart: Collection[frozenset[str]] = ()) -> list[int]:
    """Places of rows in which every pair of values occurs that occurs in any row; the same ones at every call.

    Greedy: the row with most new pairs, of equal ones the first. Two columns of `apart` need not meet, but all their
    values occur. All rows have the same columns.
    """
    columns = {name: _numbered([row[name] for row in rows]) for name in rows[0]}
    meetings = [*columns.values()]
    for one, two in combinations(columns, 2):
        if frozenset({one, two}) not in apart:
            meetings.append(columns[one] * (columns[two].max() + 1) + columns[two])
    ends = np.cumsum([0, *[meeting.max() + 1 for meeting in meetings]])
    met = np.stack(meetings, 1) + ends[:-1]  # [rows, meetings]: every value and pair has a number of its own
    left = np.zeros(ends[-1], dtype=bool)
    left[met] = True
    chosen = []
    while left.any():
        chosen.append(int(left[met].sum(1).argmax()))
        left[met[chosen[-1]]] = False
    return chosen


def _numbered(values: Sequence[Hashable]) -> np.ndarray:
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(value, len(seen)) for value in values])
