"""The search: cross-entropy. Points are drawn, the worst for A kept, the next ones drawn around those.

All chance comes from one seed, and runs are kept by what they are, so that the same search goes on after a stop without
a word of its own. Candidates are compared on a few seeds; what they win there by luck, fresh seeds take away again, so
the last word is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from statistics import mean
from typing import Any

import numpy as np

from analysis.intervals import over_seeds
from experiments.adversary.space import Dimension, Point, overrides
from experiments.settings import SettingError
from experiments.trials import Overrides, Trial, Trials

ELITE = 0.25
"""Share of a generation that the next one is drawn around."""
LEAST_SPREAD = 0.06
"""Of coordinates: a generation never shrinks to a point."""
FRESH = 1000
"""The first of the seeds that confirm."""
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Duel:
    """What is searched: A against B, overrides of each, and by which figure of a summary (less is better)."""

    a: Overrides
    b: Overrides
    base: Overrides
    key: str
    requests: int

    def runs(self, space: Sequence[Dimension], point: Point, seed: int) -> tuple[Overrides, Overrides]:
        """A's and B's, of the same requests."""
        shared = (*self.base, *overrides(space, point, self.requests), f"seed={seed}")
        return (*shared, *self.a), (*shared, *self.b)


@dataclass(frozen=True, slots=True)
class Judged:
    """A point: log of A's figure over B's, by seed; `why` it is out of question, if it is."""

    point: Point
    logs: tuple[float, ...] = ()
    why: str = ""

    @property
    def loss(self) -> float:
        """What A loses, in the logarithm; -inf for a point that is out of question."""
        return mean(self.logs) if not self.why else -inf

    @property
    def ratio(self) -> float:
        return exp(self.loss)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the ratio, over seeds."""
        low, high = over_seeds(self.logs)
        return exp(low), exp(high)


@dataclass(slots=True)
class Search:
    """`generations` of `size` points each, judged on `seeds`."""

    duel: Duel
    space: tuple[Dimension, ...]
    trials: Trials
    size: int
    generations: int
    seeds: Sequence[int]
    seed: int = 0
    judged: list[Judged] = field(default_factory=list)

    def run(self, tell: Told = lambda line: None) -> Judged:
        """The point where A loses most."""
        rng = np.random.default_rng(self.seed)
        points = [tuple(map(float, row)) for row in _stratified(rng, self.size, len(self.space))]
        for generation in range(self.generations):
            self.judged += judge(self.duel, self.space, points, self.seeds, self.trials)
            best = self.best
            told = f"A at {best.ratio:.3f} times B" if best.loss > -inf else "no point that B can serve"
            tell(f"generation {generation + 1} of {self.generations}: {told}, {len(self.trials)} runs so far")
            points = self._next(rng)
        if self.best.loss == -inf:
            raise SettingError(f"no workload of the ranges is one that both can serve: {self.best.why}; narrow --range")
        return self.best

    @property
    def best(self) -> Judged:
        return max(self.judged, key=lambda one: one.loss)

    def _next(self, rng: np.random.Generator) -> list[Point]:
        good = sorted((one for one in self.judged if one.loss > -inf), key=lambda one: -one.loss)
        if not good:
            return [tuple(map(float, row)) for row in _stratified(rng, self.size, len(self.space))]
        elite = np.array([one.point for one in good[: max(2, round(ELITE * self.size))]])
        spread = np.maximum(elite.std(axis=0), LEAST_SPREAD)
        around = elite[rng.integers(len(elite), size=self.size)]
        drawn = np.clip(rng.normal(around, spread), 0, 1)
        return [tuple(map(float, row)) for row in drawn]


def _stratified(rng: np.random.Generator, count: int, dimensions: int) -> Any:
    """A Latin hypercube: each range is covered evenly, whatever the number."""
    strata = np.stack([rng.permutation(count) for _ in range(dimensions)], axis=1)
    return (strata + rng.random((count, dimensions))) / count


def judge(
    duel: Duel, space: Sequence[Dimension], points: Sequence[Point], seeds: Sequence[int], trials: Trials
) -> list[Judged]:
    """Of all points, run side by side. Out of question is what one of both cannot serve, or B only with a growing
    queue: whoever is overloaded loses by as much as there are requests."""
    pairs = [[duel.runs(space, point, seed) for seed in seeds] for point in points]
    found = {one.overrides: one for one in trials.run([run for pair in pairs for both in pair for run in both])}
    return [
        _judged(duel, point, [(found[a], found[b]) for a, b in pair]) for point, pair in zip(points, pairs, strict=True)
    ]


def _judged(duel: Duel, point: Point, pairs: Sequence[tuple[Trial, Trial]]) -> Judged:
    for a, b in pairs:
        if why := _unserved(a) or _unserved(b):
            return Judged(point, (), why)
        if b.grows:
            return Judged(point, (), "B's queue grows over the run")
    figures = [(a.summary[duel.key], b.summary[duel.key]) for a, b in pairs]
    if not all(a and b for a, b in figures):
        return Judged(point, (), f"{duel.key} has no sample")
    return Judged(point, tuple(log(a / b) for a, b in figures))


def _unserved(trial: Trial) -> str:
    if trial.problem:
        return trial.problem
    turned_away = trial.summary["rejected"]
    return f"{turned_away} requests were turned away" if turned_away else ""


def blame(search: Search, point: Point) -> dict[str, Judged]:
    """The same point with one parameter each back in the middle of its range: what the loss hangs on."""
    moved = [tuple(0.5 if place == number else at for place, at in enumerate(point)) for number in range(len(point))]
    found = judge(search.duel, search.space, moved, search.seeds, search.trials)
    return {
        dimension.name: one
        for dimension, one in zip(search.space, found, strict=True)
        if dimension.low < dimension.high
    }
