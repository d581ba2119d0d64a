"""From timed steps to a profile: its tables and its straight lines, the tiles and the throttling that explain most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, product
from typing import TypeVar

import numpy as np

from playground.sim.cost.fitted import kind
from playground.sim.cost.fitting import BLOCK
from playground.sim.cost.judging import Pairs, judged
from playground.sim.cost.profile import MEASURED, HeldOut, Stage, Straight, Throttle
from playground.sim.cost.straight import StraightSurface, straight_of, straight_surfaces
from playground.sim.cost.surface import Surface
from playground.sim.cost.tabulating import FAMILIES, SUPPORT, Lacking, Seen, points_of, shares_of, stage_of
from playground.sim.cost.throttle import Heat

TILES = (1, 64, 128)
"""Tokens that products may be cut into, as tried."""
SECONDS, ONSETS, SLOPES = (0.1, 0.2, 0.4, 1.0, 3.0), (0.0, 0.25, 0.5), (0.08, 0.12, 0.16, 0.2, 0.3, 0.45)
"""Of throttling, as tried."""
LIKELY = 4
"""Pairs of seconds and onset that are looked at in earnest."""
EXPLAINS = 0.95
"""Of the error without it."""
PRODUCTS = 0.4
"""Share of a step's time that products take, from which on it tells of clocks."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What steps on the device take, and how far that is off."""

    stages: list[Stage]
    throttle: Throttle
    held_out: dict[str, HeldOut]
    fitted: Straight


def fit(seen: Sequence[Seen], graph_rows: int, held_out: Callable[[Seen], bool]) -> Found:
    """Tables of every stage, the throttling that explains most, and the few coefficients that say nearly the same.

    `Lacking` if steps are.
    """
    _check(seen)
    timed = _Timed(seen, [not held_out(step) for step in seen])
    tile = _tile(timed, graph_rows)
    throttle = _throttle(timed, graph_rows, tile)
    stages = _stages(timed, graph_rows, throttle, tile)
    slowed = [factors(seen, throttle, stage) for stage in range(len(stages))]
    straight = _straight(timed.training, [timed.of_training(factor) for factor in slowed], stages, graph_rows)
    test = [(step, factor) for step, factor in zip(seen, zip(*slowed, strict=True), strict=True) if held_out(step)]
    straight = replace(straight, held_out=errors(test, straight_surfaces(straight, stages, graph_rows)))
    surfaces = [Surface(stage, graph_rows) for stage in stages]
    return Found(stages, throttle, errors(test, surfaces), straight)


def _check(seen: Sequence[Seen]) -> None:
    for family in ("decode", "context", "prompt"):
        if not any(step.source == family for step in seen):
            raise Lacking(f"no step of the family {family} was timed: calibrate with larger limits or kv.blocks")


class _Timed:
    """All that was seen, for its heat, and which of it is fitted to."""

    def __init__(self, seen: Sequence[Seen], fitted_to: Sequence[bool]) -> None:
        self._seen = seen
        self._fitted_to = fitted_to
        self.training = self.of_training(seen)

    def of_training(self, values: Sequence[T]) -> list[T]:
        """Of one for each step that was seen, those of steps that are fitted to."""
        return [*compress(values, self._fitted_to)]

    def slowed(self, throttle: Throttle, stage: int) -> list[float]:
        """By how much each step that is fitted to was slowed down, by all before it."""
        return self.of_training(factors(self._seen, throttle, stage))


def _tile(timed: _Timed, graph_rows: int) -> int:
    """None (1) unless one explains some of the error of the first stage."""
    best, least = 1, EXPLAINS * _misfit(timed, graph_rows, Throttle(), 1)
    for tile in TILES[1:]:
        if (error := _misfit(timed, graph_rows, Throttle(), tile)) < least:
            best, least = tile, error
    return best


# --- throttling


def factors(seen: Sequence[Seen], throttle: Throttle, stage: int) -> list[float]:
    """By how much each step was slowed down. Steps of a session must be in order of time."""
    heats: dict[int, Heat] = {}
    return [_factor(step, heats.setdefault(step.session, Heat(throttle)), stage) for step in seen]


def _factor(step: Seen, heat: Heat, stage: int) -> float:
    """Shares are of the time without slowing down, as whoever predicts knows it: found by going to and fro."""
    if not step.shape.chunks:
        return 1.0
    factor = 1.0
    for _ in range(3):
        share = min(step.products[stage] * factor / step.seconds[stage], 1.0)
        factor = heat.factor(step.at, share)
    heat.spent(step.at, step.seconds[stage], share)
    return factor


def _throttle(timed: _Timed, graph_rows: int, tile: int) -> Throttle:
    """Of the first stage. None unless it explains some of the error: most devices never get there."""
    cold = Surface(stage_of(timed.training, [1.0] * len(timed.training), graph_rows, 0, tile), graph_rows)
    best, least = Throttle(), EXPLAINS * _misfit(timed, graph_rows, Throttle(), tile)
    for (seconds, onset), slope in product(_likely(timed, cold), SLOPES):
        throttle = Throttle(seconds, onset, slope)
        if (error := _misfit(timed, graph_rows, throttle, tile)) < least:
            best, least = throttle, error
    return best


def _likely(timed: _Timed, cold: Surface) -> list[tuple[float, float]]:
    """(seconds, onset) by which the steps that the tables say wrong were the warmer the longer they took, the best few.

    Tables are fitted anew for every throttling that is tried, which takes long; this is one look at what they leave.
    """
    heavy = [*map(_heavy, timed.training)]
    left = np.asarray([step.seconds[0] / cold.seconds(step.shape) for step in compress(timed.training, heavy)])
    if len(left) < SUPPORT:
        return []
    found = []
    for seconds, onset in product(SECONDS, ONSETS):
        warm = np.asarray(timed.slowed(Throttle(seconds, onset, min(SLOPES)), 0))[heavy]
        design = np.column_stack([np.ones(len(left)), warm])
        base, slope = np.linalg.lstsq(design, left, rcond=None)[0]
        if slope > 0:
            found.append((float(np.abs(left - base - slope * warm).mean()), seconds, onset))
    before = float(np.abs(left - left.mean()).mean())
    return [(seconds, onset) for error, seconds, onset in sorted(found)[:LIKELY] if error < before]


def _heavy(step: Seen) -> bool:
    """Whether it multiplies most of the time, on the first stage."""
    return bool(step.shape.chunks) and step.products[0] > PRODUCTS * step.seconds[0]


def _misfit(timed: _Timed, graph_rows: int, throttle: Throttle, tile: int) -> float:
    """Mean of |predicted / measured - 1|, outliers cut, of steps that multiply most of the time; on the first stage,
    each sample by itself."""
    slowed = timed.slowed(throttle, 0)
    surface = Surface(stage_of(timed.training, slowed, graph_rows, 0, tile), graph_rows)
    off = [
        abs(surface.seconds(step.shape) * factor / step.seconds[0] - 1)
        for step, factor in zip(timed.training, slowed, strict=True)
        if _heavy(step)
    ]
    return float(np.mean(np.minimum(off, 0.3))) if off else 0.0


def _stages(timed: _Timed, graph_rows: int, throttle: Throttle, tile: int) -> list[Stage]:
    stages = range(len(timed.training[0].seconds))
    return [stage_of(timed.training, timed.slowed(throttle, n), graph_rows, n, tile) for n in stages]


# --- how good it is


def errors(
    test: Sequence[tuple[Seen, Sequence[float]]], surfaces: Sequence[Surface | StraightSurface]
) -> dict[str, HeldOut]:
    """Of all stages together, by source and kind of step. `test`: steps, and by how much each was slowed on each."""
    groups: dict[str, Pairs] = {}
    for number, (step, factor) in enumerate(test):
        predicted = sum(s.seconds(step.shape) * f for s, f in zip(surfaces, factor, strict=True))
        # Repetitions of a probe are alike, and so are neighbours in a run.
        part = step.name if step.source in FAMILIES else number // BLOCK
        for name in (step.source, f"{step.source}, {kind(step.shape)}"):
            groups.setdefault(name, Pairs()).add(predicted, sum(step.seconds), part)
    return judged(groups)


# --- straight lines


def _straight(
    training: Sequence[Seen], slowed: Sequence[Sequence[float]], stages: Sequence[Stage], graph_rows: int
) -> Straight:
    """Of the same steps as the tables; not yet judged."""
    by_stage = [points_of(training, factor, stage) for stage, factor in enumerate(slowed)]
    seconds = [np.asarray([point.seconds for point in points]) for points in by_stage]
    shapes = [point.shape for point in by_stage[0]]
    return straight_of(shapes, seconds, shares_of(by_stage[0]), stages, graph_rows, MEASURED)
