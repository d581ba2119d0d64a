"""What a card is: a paper with its version, a setting, arms that are compared under loads, and claims about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import mean

from analysis.intervals import over_seeds
from experiments.composing import composed
from experiments.settings import SettingError
from experiments.trials import Overrides, Trial, Trials

REPRODUCED, PARTLY, NOT, UNTESTABLE = "reproduced", "partly", "not reproduced", "not testable here"
SEEDS = 5


@dataclass(frozen=True, slots=True)
class Effect:
    """A ratio over seeds, paired: mean, its 95 % interval, and each seed's."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    def __str__(self) -> str:
        bounds = "" if isnan(self.low) else f" [{self.low - 1:+.1%}, {self.high - 1:+.1%}]"
        return f"{self.mean - 1:+.1%}{bounds}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a claim. `robust`: the same against the baseline at its own best setting, in a line."""

    verdict: str
    figure: str
    robust: str = ""


class Results:
    """Figures of a card's runs, by arm, load and seed."""

    def __init__(self, trials: Mapping[tuple[str, str, int], Trial], seeds: Sequence[int]) -> None:
        self._trials = trials
        self.seeds = tuple(seeds)

    def value(self, arm: str, load: str, seed: int, key: str) -> float:
        """Of a summary; not a number where it has none."""
        found = self._trials[arm, load, seed].summary.get(key)
        return nan if found is None else float(found)

    def mean(self, arm: str, load: str, key: str) -> float:
        return mean(self.value(arm, load, seed, key) for seed in self.seeds)

    def ratio(self, arm: str, other: str, load: str, key: str) -> Effect:
        """`arm` over `other`, seed by seed."""
        pairs = [(self.value(arm, load, seed, key), self.value(other, load, seed, key)) for seed in self.seeds]
        ratios = tuple(one / two if two else nan for one, two in pairs)
        return Effect(mean(ratios), *over_seeds(ratios), ratios)

    def best(self, arms: Sequence[str], load: str, key: str, more: bool = False) -> str:
        """The arm with the least (or `more`) of a figure, on average over seeds."""
        return (max if more else min)(arms, key=lambda arm: self.mean(arm, load, key))


Judge = Callable[[Results], Finding]


@dataclass(frozen=True, slots=True)
class Claim:
    """`said`: by the paper, in its words or figures, with the place."""

    name: str
    said: str
    judge: Judge


@dataclass(frozen=True, slots=True)
class Card:
    """`setting` holds for all runs, `small` besides where a card is to take seconds. `knob`: arms that are the baseline
    at other settings of its own, the first of them as the paper had it."""

    name: str
    title: str
    source: str
    setting: Overrides
    arms: Mapping[str, Overrides]
    loads: Mapping[str, Overrides]
    knob: Sequence[str]
    claims: Sequence[Claim]
    small: Overrides
    small_loads: Mapping[str, Overrides]
    notes: Sequence[str] = field(default_factory=tuple)

    def runs(self, small: bool, seeds: Sequence[int], more: Overrides = ()) -> dict[tuple[str, str, int], Overrides]:
        """Overrides by arm, load and seed. Seeds are shared by arms: they serve the same requests."""
        loads = {**self.loads, **self.small_loads} if small else self.loads
        base = (*self.setting, *(self.small if small else ()), *more)
        return {
            (arm, load, seed): (*base, *loaded, *chosen, f"seed={seed}")
            for load, loaded in loads.items()
            for arm, chosen in self.arms.items()
            for seed in seeds
        }


def results(
    card: Card, trials: Trials, small: bool, seeds: Sequence[int], more: Overrides, progress: Callable[[int, int], None]
) -> Results:
    """Run what has not been. A run that fails ends it: claims are about all of them."""
    wanted = card.runs(small, seeds, more)
    composed(list(next(iter(wanted.values()))))  # a wrong word is told before anything runs
    made = dict(zip(wanted, trials.run(list(wanted.values()), progress), strict=True))
    for trial in made.values():
        if trial.problem:
            raise SettingError(f"{' '.join(trial.overrides)}: {trial.problem}")
    return Results(made, seeds)


# --- how claims are judged


def changes(
    arm: str,
    other: str,
    load: str,
    key: str,
    less: bool,
    said: tuple[float, float] | None = None,
    knob: Sequence[str] = (),
) -> Judge:
    """`arm` has less (or more) of a figure than `other`: reproduced if the interval of the ratio lies on that side of 1
    and meets the range that was `said` (as changes: -0.2 is a fifth less); partly if only the side is right.

    `knob`: arms among which the baseline's best one for this figure is chosen for the robustness line.
    """

    def judge(found: Results) -> Finding:
        effect = found.ratio(arm, other, load, key)
        robust = ""
        if knob:
            best = found.best(knob, load, key, more=not less)
            robust = f"against {best}: {found.ratio(arm, best, load, key)}"
        return Finding(verdict(effect, less, said), f"{key} {effect} ({arm} against {other}, {load})", robust)

    return judge


def verdict(effect: Effect, less: bool, said: tuple[float, float] | None) -> str:
    """Of an effect against a claim."""
    low, high = (effect.mean, effect.mean) if isnan(effect.low) else (effect.low, effect.high)
    if not (high < 1 if less else low > 1):
        return NOT
    if said is None or (low - 1 <= said[1] and high - 1 >= said[0]):
        return REPRODUCED
    return PARTLY


def little(arms: Sequence[str], other: str, load: str, key: str, most: float) -> Judge:
    """None of `arms` differs from `other` by more than so much, by the whole of its interval; partly: by its mean."""

    def judge(found: Results) -> Finding:
        effects = {arm: found.ratio(arm, other, load, key) for arm in arms}
        worst = max(effects, key=lambda arm: abs(effects[arm].mean - 1))
        whole = all(abs(end - 1) <= most for one in effects.values() for end in (one.low, one.high) if not isnan(end))
        means = all(abs(one.mean - 1) <= most for one in effects.values())
        told = REPRODUCED if whole and means else PARTLY if means else NOT
        return Finding(told, f"{key} at most {effects[worst]} ({worst} against {other}, {load})")

    return judge


def untestable(what: str) -> Judge:
    """`what` is missing here."""
    return lambda found: Finding(UNTESTABLE, what)
