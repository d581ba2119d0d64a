"""Successive halving: many candidates with few requests, the best of them with more, and so on.

Optuna proposes (TPE, from a seed) and keeps what was reported; who goes on is decided here, a batch at a time, so that
a batch runs on all cores and the same command asks for the same runs again. Runs are kept (`experiments.trials`): a
search that was stopped goes on, without a database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from statistics import mean

from experiments.settings import SettingError
from experiments.trials import Overrides, Progress, Trial, Trials
from experiments.tuning.space import Parameter, Value

Values = Mapping[str, Value]
Told = Callable[[str], None]
NEED_SLO = ("request_goodput", "slo_attainment")


@dataclass(frozen=True, slots=True)
class Rungs:
    """`full` requests at the top, a `factor` less at each rung below; as many candidates less go on to each."""

    full: int
    factor: int
    count: int

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise SettingError(f"study.factor={self.factor} must be at least 2")
        if self.count < 1:
            raise SettingError(f"study.rungs={self.count} must be at least 1")
        if self.requests[0] < 10:
            raise SettingError(
                f"study.requests={self.full} leaves {self.requests[0]} for the lowest of {self.count} rungs: "
                "raise it, or lower study.rungs or study.factor"
            )

    @property
    def requests(self) -> list[int]:
        """Of each rung, ascending."""
        return [self.full // self.factor**below for below in reversed(range(self.count))]

    def kept(self, candidates: int) -> int:
        """How many go on."""
        return ceil(candidates / self.factor)


@dataclass(frozen=True, slots=True)
class Candidate:
    """`reached`: the rung it got to, from 0; `value` there, infinite where it could not serve."""

    values: Values
    reached: int
    value: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Judge:
    """Turns a candidate's runs into a figure: the mean over `seeds` of a key of their summaries."""

    base: Overrides
    key: str
    more: bool
    """Of it is better."""
    seeds: Sequence[int]
    trials: Trials
    progress: Progress = lambda done, total: None

    def figures(self, candidates: Sequence[Values], requests: int) -> list[tuple[float, str]]:
        """Of each candidate, less being better, and why it has none."""
        runs = [[self.run(values, requests, seed) for seed in self.seeds] for values in candidates]
        found = iter(self.trials.run([run for each in runs for run in each], self.progress))
        answers = []
        for each in runs:
            mine = [self.figure(next(found)) for _ in each]
            why = next((why for _, why in mine if why), "")
            value = inf if why else mean(value for value, _ in mine)
            answers.append((-value if self.more and not why else value, why))
        return answers

    def figure(self, trial: Trial) -> tuple[float, str]:
        """Of one run, and why it has none."""
        if trial.problem:
            return inf, trial.problem
        if turned_away := trial.summary.get("rejected", 0):
            return inf, f"{turned_away} requests were turned away"
        value = trial.summary.get(self.key)
        if value is None:
            return inf, f"{self.key} has no value{': it needs slo=' if self.key in NEED_SLO else ''}"
        return float(value), ""

    def run(self, values: Values, requests: int, seed: int) -> Overrides:
        options = [f"{option}={_plain(value)}" for option, value in values.items()]
        return (*self.base, *options, f"workload.requests={requests}", f"seed={seed}")


def _plain(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else str(value)


def words(values: Values) -> str:
    """As a command line has them."""
    return " ".join(f"{option}={_plain(value)}" for option, value in values.items())


@dataclass(slots=True)
class Halving:
    """`batch` candidates at a time, until there were `count`. `first`: values to begin with, as what is set now."""

    space: Sequence[Parameter]
    rungs: Rungs
    judge: Judge
    count: int
    batch: int
    seed: int = 0
    first: Values | None = None
    candidates: list[Candidate] = field(default_factory=list)

    def run(self, tell: Told = lambda line: None) -> list[Candidate]:
        """All of them, the best first: whoever got further is better."""
        import optuna  # of an extra

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=self.batch, multivariate=False)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        if self.first:
            study.enqueue_trial(dict(self.first))
        while len(self.candidates) < self.count:
            asked = [study.ask() for _ in range(min(self.batch, self.count - len(self.candidates)))]
            found = self._climb([{one.option: one.ask(trial) for one in self.space} for trial in asked])
            for trial, candidate in zip(asked, found, strict=True):
                # Candidates that stopped early are told with the figure of their rung: requests are fewer there, and
                # figures of rungs are alike, not equal. Those that could not serve are told as failed.
                if isfinite(candidate.value):
                    study.tell(trial, candidate.value)
                else:
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
            self.candidates += found
            tell(self._progress())
        return self.best()

    def best(self) -> list[Candidate]:
        return sorted(self.candidates, key=lambda one: (not isfinite(one.value), -one.reached, one.value))

    def _climb(self, values: Sequence[Values]) -> list[Candidate]:
        reached: dict[int, Candidate] = {}
        going = list(range(len(values)))
        for rung, requests in enumerate(self.rungs.requests):
            figures = self.judge.figures([values[number] for number in going], requests)
            for number, (value, why) in zip(going, figures, strict=True):
                reached[number] = Candidate(values[number], rung, value, why)
            alive = [number for number in going if isfinite(reached[number].value)]
            going = sorted(sorted(alive, key=lambda number: reached[number].value)[: self.rungs.kept(len(going))])
            if not going:
                break
        return [reached[number] for number in range(len(values))]

    def _progress(self) -> str:
        best = self.best()[0]
        told = f"{words(best.values)} ({best.value:.4g})" if isfinite(best.value) else "none that could serve"
        return f"{len(self.candidates)} of {self.count} candidates, {len(self.judge.trials)} runs; best so far: {told}"
