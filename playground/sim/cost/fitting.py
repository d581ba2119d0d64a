"""Fitting logged steps: least squares without negative coefficients, what it cannot tell, and how far it is off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from playground.sim.cost.fitted import FEATURES, HOST_FEATURES, Array, Error, Fit, Line, kind
from playground.sim.cost.logged import Logged
from playground.sim.cost.shape import Shape

Mask = NDArray[np.bool_]

KNEES = (32, 64, 128, 256, 512, 1024)
LEAST = 10 * len(FEATURES)
"""Steps that a fit needs."""
DISTINCT = 2 * len(FEATURES)
"""Different shapes among them."""
BLOCK = 16
"""Consecutive steps that are held out, or drawn again, together: neighbours are alike."""
HUBER = 1.345
"""Standard deviations beyond which an error counts by its size, no longer by its square: 95 % as good as least squares
on normal noise."""
ROUNDS = 8
"""Of reweighting."""
RANGE = ("tokens", "decode_context", "prefill_pairs", "sequences")
"""Quantities of a step whose largest value is kept."""


def fit(
    logged: Sequence[Logged], sources: Sequence[str], held_out: float = 0.2, draws: int = 200, seed: int = 0
) -> Fit:
    """Least squares of relative errors without negative coefficients (NNLS), outliers counting less, any knee tried.

    `held_out`: the share of steps, in blocks of neighbours, that only tell the error. `draws`: bootstrap fits behind
    the intervals. `ValueError`, in one line, where the steps cannot tell the coefficients apart.
    """
    _check(logged, held_out, draws)
    rng = np.random.default_rng(seed)
    training, test = _split(logged, held_out, rng)
    knee = min(_knees(training), key=lambda knee: _misfit(training, knee))
    _check_apart(_design(training, knee))
    stages = range(len(logged[0].seconds))
    lines = [_line(training, knee, stage, draws, rng) for stage in stages]
    host = _host_line(training, draws, rng)
    return Fit(knee, lines, host, _largest(logged), _errors(test, knee, lines), [*sources])


def _check(logged: Sequence[Logged], held_out: float, draws: int) -> None:
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out:g} must lie between 0 and 1: without steps held out no error is known")
    if draws < 20:
        raise ValueError(f"bootstrap={draws} must be at least 20: intervals are its 2.5th and 97.5th percentiles")
    if len(logged) < LEAST:
        raise ValueError(f"{len(logged)} steps are too few for {len(FEATURES)} coefficients: log {LEAST} or more")
    if min(min(step.seconds) for step in logged) <= 0:
        raise ValueError("steps of 0 seconds or less: a fit of relative errors needs times that passed")
    if len({len(step.seconds) for step in logged}) > 1:
        raise ValueError("runs with different numbers of pipeline stages: fit them apart")
    shapes = {step.shape for step in logged}
    if len(shapes) < DISTINCT:
        raise ValueError(
            f"only {len(shapes)} different steps in {len(logged)}: log many batch sizes and lengths ({DISTINCT} or "
            "more)"
        )
    if not any(shape.decodes for shape in shapes) or not any(shape.prefill_tokens for shape in shapes):
        lacking = "decodes" if any(shape.prefill_tokens for shape in shapes) else "prefills"
        raise ValueError(f"no step has {lacking}: what was never seen would be predicted as free; log a run with them")


def _split(logged: Sequence[Logged], held_out: float, rng: np.random.Generator) -> tuple[list[Logged], list[Logged]]:
    """(fitted to, held out), whole blocks of neighbours; at least one of each."""
    blocks = [logged[start : start + BLOCK] for start in range(0, len(logged), BLOCK)]
    order = rng.permutation(len(blocks))
    count = min(max(round(held_out * len(blocks)), 1), len(blocks) - 1)
    chosen = {*order[:count].tolist()}
    training = [step for index, block in enumerate(blocks) if index not in chosen for step in block]
    return training, [step for index, block in enumerate(blocks) if index in chosen for step in block]


def _knees(logged: Sequence[Logged]) -> list[int]:
    """Those with a twentieth of the steps, at least, on either side; else the largest step, beyond which nothing is."""
    tokens = np.asarray([step.shape.tokens for step in logged])
    inside = [knee for knee in KNEES if 0.05 <= (tokens > knee).mean() <= 0.95]
    return inside or [int(tokens.max())]


def _features(shape: Shape, knee: int) -> tuple[float, ...]:
    tokens = shape.tokens
    return 1.0, tokens, max(tokens - knee, 0), shape.decode_context, shape.prefill_pairs, shape.sequences


def _design(logged: Sequence[Logged], knee: int) -> Array:
    """[step, feature]"""
    return np.asarray([_features(step.shape, knee) for step in logged], float)


def _times(logged: Sequence[Logged], stage: int) -> Array:
    return np.asarray([step.seconds[stage] for step in logged])


def _weights(design: Array, times: Array) -> Array:
    """Of each step: 1 / its prediction, so that errors count as shares, less where it is far off (Huber).

    Relative to the measured time instead, one that is too long could be off by 100 % at most, and noise would pull
    predictions down. Steps that the machine held up by chance, garbage collection and the like, are not to pull at all.
    """
    weights = 1 / times
    for _ in range(ROUNDS):
        predicted = design @ nnls(design * weights[:, None], times * weights)
        predicted = np.maximum(predicted, 1e-3 * np.median(times))
        off = np.abs(times / predicted - 1)
        limit = max(HUBER * float(np.median(off)) / 0.6745, 1e-9)
        weights = np.sqrt(np.minimum(limit / np.maximum(off, limit), 1.0)) / predicted
    return weights


def _misfit(logged: Sequence[Logged], knee: int) -> float:
    """Mean of |log(predicted / measured)| of the best fit with this knee, summed over the stages."""
    design, total = _design(logged, knee), 0.0
    for stage in range(len(logged[0].seconds)):
        times = _times(logged, stage)
        weights = _weights(design, times)
        predicted = design @ nnls(design * weights[:, None], times * weights)
        total += float(np.abs(np.log(np.maximum(predicted, 1e-12) / times)).mean())
    return total


def _check_apart(design: Array) -> None:
    """Features that always move together leave their coefficients to chance. One that is always 0 is left at 0."""
    present = [index for index in range(design.shape[1]) if design[:, index].any()]
    scaled = design[:, present] / np.linalg.norm(design[:, present], axis=0)
    _, sizes, rows = np.linalg.svd(scaled, full_matrices=False)
    if sizes[-1] > 1e-6 * sizes[0]:
        return
    together = [FEATURES[present[index]] for index in np.nonzero(np.abs(rows[-1]) > 0.1)[0]]
    raise ValueError(
        f"{' and '.join(together)} always move together in these steps: log batches of other sizes and lengths, too"
    )


def _line(logged: Sequence[Logged], knee: int, stage: int, draws: int, rng: np.random.Generator) -> Line:
    design, times = _design(logged, knee), _times(logged, stage)
    weights = _weights(design, times)
    return _with_intervals(design * weights[:, None], times * weights, FEATURES, draws, rng)


def _host_line(logged: Sequence[Logged], draws: int, rng: np.random.Generator) -> Line:
    """Seconds of the host before a launch: absolute errors, since they may be 0."""
    design = np.asarray([(1.0, step.shape.sequences) for step in logged])
    return _with_intervals(design, np.asarray([step.host for step in logged]), HOST_FEATURES, draws, rng)


def _with_intervals(design: Array, target: Array, names: Sequence[str], draws: int, rng: np.random.Generator) -> Line:
    """Bootstrap over blocks of neighbours, drawn with replacement."""
    starts = np.arange(0, len(target), BLOCK)
    grams = np.add.reduceat(design[:, :, None] * design[:, None, :], starts)
    rights = np.add.reduceat(design * target[:, None], starts)
    picks = rng.integers(0, len(starts), (draws, len(starts)))
    drawn = np.asarray([_nnls_of(grams[pick].sum(0), rights[pick].sum(0)) for pick in picks])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    best = _nnls_of(grams.sum(0), rights.sum(0))
    named = [dict(zip(names, map(float, values), strict=True)) for values in (best, low, high)]
    return Line(*named)


def nnls(design: Array, target: Array) -> Array:
    """The x of least |design x - target| with no negative element (Lawson and Hanson, 1974, chapter 23)."""
    return _nnls_of(design.T @ design, design.T @ target)


def _nnls_of(gram: Array, right: Array) -> Array:
    """From the normal equations, scaled so that features of any unit weigh alike."""
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0
    gram, right = gram / scale[:, None] / scale, right / scale
    size = len(right)
    best, free = np.zeros(size), np.zeros(size, bool)
    tolerance = 1e-10 * max(float(np.abs(right).max()), 1e-300)
    for _ in range(3 * size):
        slope = right - gram @ best
        if free.all() or slope[~free].max() <= tolerance:
            break
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        best = _within(gram, right, best, free)
    return best / scale


def _within(gram: Array, right: Array, best: Array, free: Mask) -> Array:
    """Least squares over the free elements, giving up those that would become negative. `free` is narrowed."""
    while True:
        wanted = np.zeros(len(right))
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
        negative = free & (wanted <= 0)
        if not negative.any():
            return wanted
        step = float(np.min(best[negative] / np.maximum(best[negative] - wanted[negative], 1e-300)))
        best = best + step * (wanted - best)
        free &= best > 1e-14
        best = np.where(free, best, 0.0)


def _largest(logged: Sequence[Logged]) -> dict[str, float]:
    return {name: float(max(getattr(step.shape, name) for step in logged)) for name in RANGE}


def _errors(test: Sequence[Logged], knee: int, lines: Sequence[Line]) -> dict[str, Error]:
    """Of the stages' sum, by kind of step."""
    coefficients = sum(np.asarray([line.coefficients[name] for name in FEATURES]) for line in lines)
    predicted = _design(test, knee) @ coefficients
    measured = np.asarray([sum(step.seconds) for step in test])
    kinds = np.asarray([kind(step.shape) for step in test])
    chosen = {"all": np.ones(len(test), bool)} | {name: kinds == name for name in ("decode", "prefill", "mixed")}
    return {name: Error.of(predicted[rows], measured[rows]) for name, rows in chosen.items() if rows.any()}
