"""Confidence intervals of means over requests that are not independent: neighbours share a queue, so blocks of them are
drawn, not single ones.

Source: the moving-block bootstrap (Kunsch, "The jackknife and the bootstrap for general stationary observations",
Annals of Statistics 17(3), 1989).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from analysis.tokens import Array

DRAWS = 1000
LEVEL = 0.95


def interval(values: Array, of: Callable[[Array], Array] | None = None, level: float = LEVEL) -> tuple[float, float]:
    """Of the mean of `values`, in the order in which they came; equal values, equal interval.

    `of`: another statistic, from samples [draws, n] to one number each. Blocks are n ** (1/3) long, the rate that suits
    a mean. Fewer than two values have no interval: (nan, nan).
    """
    count = len(values)
    if count < 2:
        return float("nan"), float("nan")
    length = max(round(count ** (1 / 3)), 1)
    rng = np.random.default_rng(0)
    blocks = -(-count // length)
    starts = rng.integers(0, count - length + 1, size=(DRAWS, blocks))
    places = (starts[:, :, None] + np.arange(length)).reshape(DRAWS, -1)[:, :count]
    drawn = np.asarray(values, dtype=float)[places]
    found = drawn.mean(axis=1) if of is None else of(drawn)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
