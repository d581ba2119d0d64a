"""The fitted model of a calibration: a few coefficients a stage, none negative, where the profiled one has tables.

In seconds, of what is computed, padding included:

    base + tokens * t + beyond_knee * max(t - knee, 0) + decode_context * K + prefill_pairs * P + sequences * n

as of logged steps (`playground.sim.cost.fitted`); a step that no graph takes is not over before it is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from playground.sim.cost.fitted import FEATURES, Array
from playground.sim.cost.fitting import HUBER, KNEES, nnls
from playground.sim.cost.profile import Launch, Line, Stage, Straight
from playground.sim.cost.shape import Shape
from playground.sim.cost.surface import in_tiles, step_bucket

FLOOR = 1.5
"""A step launched kernel by kernel tells of kernels only if it takes so many times as long as launching does."""
ROUNDS = 6
"""Of reweighting."""
DRAWS = 200
"""Fits to points drawn again, behind the intervals."""
AROUND = 0.05
"""Share of the points that a knee must have on either side."""


@dataclass(slots=True)
class StraightSurface:
    """Seconds of one stage, alone on an unthrottled device."""

    line: Line
    knee: int
    tile: int
    launching: Launch
    graph_rows: int
    _coefficients: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._coefficients = tuple(self.line.coefficients[name] for name in FEATURES)

    def seconds(self, shape: Shape) -> float:
        base, token, beyond, context, pair, sequence = self._coefficients
        tokens = computed(shape, self.tile, self.graph_rows)
        time = base + token * tokens + context * shape.decode_context + pair * shape.prefill_pairs
        time += beyond * max(tokens - self.knee, 0) + sequence * shape.sequences
        eager = self.graph_rows and step_bucket(shape, self.graph_rows) is None
        return max(time, self.launch(shape)) if eager else time

    def launch(self, shape: Shape) -> float:
        """Of the host, for a step that no graph takes."""
        return self.launching.base + self.launching.sequence * shape.sequences


def straight_surfaces(straight: Straight, stages: Sequence[Stage], graph_rows: int) -> list[StraightSurface]:
    """Of every stage; tiles, and what it takes to launch a step, are those of the tables."""
    return [
        StraightSurface(line, straight.knee, stage.prompts.tile, stage.launch, graph_rows)
        for line, stage in zip(straight.stages, stages, strict=True)
    ]


def computed(shape: Shape, tile: int, graph_rows: int) -> int:
    """Tokens, those included that a step is padded with: by a graph, or to whole tiles beside prompts."""
    found = step_bucket(shape, graph_rows)
    tokens = shape.tokens if found is None else sum(found)
    return in_tiles(tokens, tile) if shape.chunks else tokens


def _features(shapes: Sequence[Shape], knee: int, tile: int, graph_rows: int) -> Array:
    """[shape, feature]"""
    rows = []
    for shape in shapes:
        tokens = computed(shape, tile, graph_rows)
        context, pairs = shape.decode_context, shape.prefill_pairs
        rows.append((1.0, tokens, max(tokens - knee, 0), context, pairs, shape.sequences))
    return np.asarray(rows, float)


def straight_of(
    shapes: Sequence[Shape],
    seconds: Sequence[Array],
    weights: Array,
    stages: Sequence[Stage],
    graph_rows: int,
    fitted_to: str,
) -> Straight:
    """Not yet judged. `seconds[stage]` of each shape, which counts `weights` times; `stages`: the tables."""
    launch = stages[0].launch
    kept = [_of_kernels(shape, time, launch, graph_rows) for shape, time in zip(shapes, seconds[0], strict=True)]
    shapes = [shape for shape, keep in zip(shapes, kept, strict=True) if keep]
    seconds, weights = [times[kept] for times in seconds], weights[kept]
    tile = stages[0].prompts.tile
    knee = _knee(shapes, seconds, weights, tile, graph_rows)
    features = _features(shapes, knee, tile, graph_rows)
    return Straight(knee, [_line(features, times, weights) for times in seconds], {}, fitted_to, len(shapes))


def _of_kernels(shape: Shape, seconds: float, launch: Launch, graph_rows: int) -> bool:
    """What only launching bounds tells of no kernel."""
    if not graph_rows or step_bucket(shape, graph_rows) is not None:
        return True
    return seconds > FLOOR * (launch.base + launch.sequence * shape.sequences)


def _knee(shapes: Sequence[Shape], stages: Sequence[Array], weights: Array, tile: int, graph_rows: int) -> int:
    """The one with the least |log(predicted / measured)|; the largest step where too few lie on either side of any."""
    tokens = np.asarray([computed(shape, tile, graph_rows) for shape in shapes])
    inside = [knee for knee in KNEES if AROUND <= (tokens > knee).mean() <= 1 - AROUND]

    def misfit(knee: int) -> float:
        features = _features(shapes, knee, tile, graph_rows)
        off = [np.abs(np.log(features @ _best(features, times, weights) / times)) for times in stages]
        return float(sum(off) @ weights)

    return min(inside, key=misfit) if inside else int(tokens.max())


def _line(features: Array, seconds: Array, weights: Array, seed: int = 0) -> Line:
    """Bounds are those of fits to points drawn again, each counting as it did."""
    scale = _scale(features, seconds, weights)
    rows, target = features * scale[:, None], seconds * scale
    best = nnls(rows, target)
    picks = np.random.default_rng(seed).integers(0, len(seconds), (DRAWS, len(seconds)))
    drawn = [nnls(rows[pick], target[pick]) for pick in picks]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Line(*[dict(zip(FEATURES, map(float, values), strict=True)) for values in (best, low, high)])


def _best(features: Array, seconds: Array, weights: Array) -> Array:
    """Least squares of relative errors, outliers counting less, without negative coefficients."""
    scale = _scale(features, seconds, weights)
    return nnls(features * scale[:, None], seconds * scale)


def _scale(features: Array, seconds: Array, weights: Array) -> Array:
    """What each row is multiplied with, so that errors are shares of the prediction, and outliers count less.

    As shares of what was measured, noise would pull the prediction down.
    """
    scale: Array = weights / seconds
    for _ in range(ROUNDS):
        found = nnls(features * scale[:, None], seconds * scale)
        predicted = np.maximum(features @ found, 1e-3 * float(np.median(seconds)))
        off = np.abs(seconds / predicted - 1)
        limit = max(HUBER * float(np.median(off)) / 0.6745, 1e-9)
        scale = weights * np.sqrt(np.minimum(limit / np.maximum(off, limit), 1.0)) / predicted
    return scale
