"""Lines through measured times, none of their coefficients negative, with bootstrap bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from playground.sim.cost.fitted import Array
from playground.sim.cost.fitting import HUBER, nnls
from playground.sim.cost.profile import Line

ROUNDS = 6
"""Of reweighting."""
DRAWS = 200


def line(
    units: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    relative: bool = False,
    robust: bool = True,
    seed: int = 0,
) -> Line:
    """`base` and so much a unit, by least squares that are not negative, with bootstrap intervals.

    `robust`: outliers, what the machine held up by chance, count less. Without it the sum is kept.
    """
    target = np.asarray(seconds, float)
    design = np.column_stack([np.ones(len(target)), *[np.asarray(values, float) for values in units.values()]])
    names = ["base", *units]
    if not len(target):
        return Line(dict.fromkeys(names, 0.0))
    weights = 1 / np.maximum(target, 1e-9) if relative else np.ones(len(target))
    rounds = ROUNDS if robust else 0
    best = robust_fit(design, target, weights, rounds)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(target), (DRAWS, len(target)))
    drawn = [robust_fit(design[pick], target[pick], weights[pick], min(rounds, 2)) for pick in picks]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Line(*[dict(zip(names, map(float, values), strict=True)) for values in (best, low, high)])


def robust_fit(design: Array, target: Array, weights: Array, rounds: int = ROUNDS) -> Array:

    found = nnls(design * weights[:, None], target * weights)
    for _ in range(rounds):
        off = np.abs(design @ found - target) * weights
        limit = max(HUBER * float(np.median(off)) / 0.6745, 1e-15)
        extra = np.sqrt(np.minimum(limit / np.maximum(off, limit), 1.0)) * weights
        found = nnls(design * extra[:, None], target * extra)
    return found
