"""Searches over seeds and alternatives, carried on together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from analysis.intervals import over_seeds
from experiments.capacity.objectives import Objective, missed
from experiments.capacity.search import Search
from experiments.settings import SettingError
from experiments.trials import Overrides, Trial, Trials

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one alternative: requests a second by seed, and what was missed beyond."""

    name: str
    by_seed: dict[int, float]
    found: dict[int, bool]
    missed: dict[str, int]
    """What did not hold at the smallest rate that failed, by how many seeds."""

    @property
    def mean(self) -> float:
        return mean(self.by_seed.values())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean over seeds, by Student's t; (nan, nan) of fewer than two."""
        return over_seeds(list(self.by_seed.values()))


def find(
    alternatives: Mapping[str, Overrides],
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    trials: Trials,
    start: float,
    tolerance: float,
    tell: Told = lambda line: None,
) -> list[Capacity]:
    """Common random numbers: a seed's requests are the same for each alternative and, but for their pace, each rate."""
    searches = {(name, seed): Search(start, tolerance) for name in alternatives for seed in seeds}
    last: dict[tuple[str, int], list[str]] = {}
    turn = 0
    while ahead := {key: rate for key, search in searches.items() if (rate := search.rate) is not None}:
        turn += 1
        tell(f"round {turn}: {len(ahead)} of {len(searches)} searches go on, {len(trials)} runs so far")
        wanted = [_overrides(alternatives[name], seed, rate) for (name, seed), rate in ahead.items()]
        for (key, rate), trial in zip(ahead.items(), trials.run(wanted), strict=True):
            why = _missed(trial, objectives)
            searches[key].tell(rate, not why)
            if why:
                last[key] = why
    return [_capacity(name, seeds, searches, last) for name in alternatives]


def _overrides(given: Overrides, seed: int, rate: float) -> Overrides:
    return (*given, f"seed={seed}", f"workload.rate={rate:.6g}")


def _missed(trial: Trial, objectives: tuple[Objective, ...]) -> list[str]:
    if trial.problem:
        raise SettingError(f"{' '.join(trial.overrides)}: {trial.problem}")
    return [word.partition("=")[0] for word in missed(objectives, trial.summary, trial.grows)]


def _capacity(
    name: str,
    seeds: Sequence[int],
    searches: Mapping[tuple[str, int], Search],
    last: Mapping[tuple[str, int], list[str]],
) -> Capacity:
    mine = {seed: searches[name, seed] for seed in seeds}
    words = [word for seed in seeds for word in last.get((name, seed), [])]
    return Capacity(
        name,
        {seed: search.capacity for seed, search in mine.items()},
        {seed: search.found for seed, search in mine.items()},
        {word: words.count(word) for word in dict.fromkeys(words)},
    )
