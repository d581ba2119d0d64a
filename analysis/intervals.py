"""Confidence intervals: over runs of several seeds, which are independent; and over requests, which are not: neighbours
share a queue, so blocks of them are drawn.

Source: the moving-block bootstrap (Kunsch, "The jackknife and the bootstrap for general stationary observations",
Annals of Statistics 17(3), 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, nan, sqrt
from statistics import mean as average
from statistics import stdev

import numpy as np

from analysis.tokens import Array

DRAWS = 1000
LEVEL = 0.95
AT_A_TIME = 1 << 22
"""Values that are drawn at once, or a sample of many requests would take gigabytes."""

Statistic = Callable[[Array], Array]
"""Of samples [draws, n, ...], one number each."""


def mean(samples: Array) -> Array:
    found: Array = samples.mean(axis=1)
    return found


def quantile(q: float) -> Statistic:
    """The q-th percentile, linear as numpy's."""
    return lambda samples: np.percentile(samples, q, axis=1)


def interval(values: Array, of: Statistic = mean, level: float = LEVEL) -> tuple[float, float]:
    """Of a statistic of `values` [n, ...], in the order in which they came; equal values, equal interval.

    Blocks are n ** (1/3) long, the rate that suits a mean. Fewer than two values have no interval: (nan, nan). Time
    and memory are linear in n: a second for 100,000.
    """
    values = np.asarray(values, dtype=float)
    count = len(values)
    if count < 2:
        return nan, nan
    length = max(round(count ** (1 / 3)), 1)
    rng = np.random.default_rng(0)
    within, found = np.arange(length), []
    draws = max(min(AT_A_TIME // max(values.size, 1), DRAWS), 1)
    for begin in range(0, DRAWS, draws):
        some = min(draws, DRAWS - begin)
        starts = rng.integers(0, count - length + 1, size=(some, -(-count // length)))
        places = (starts[:, :, None] + within).reshape(some, -1)[:, :count]
        found.append(of(values[places]))
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def over_seeds(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Of a mean of independent values, by Student's t; (nan, nan) of fewer than two, or where one is not finite."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return nan, nan
    from scipy.stats import t as student  # of an extra

    half = float(student.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return average(values) - half, average(values) + half
