"""`playground sweep=optuna`: a policy's parameters, by Optuna with successive halving; what survives is confirmed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import exp, isfinite, isnan, log, nan
from pathlib import Path
from statistics import mean
from typing import Any

from omegaconf import OmegaConf

from analysis.intervals import over_seeds
from experiments import provenance
from experiments.build import make
from experiments.composing import composed
from experiments.conformance import shown
from experiments.settings import SettingError, read
from experiments.trials import Overrides, Progress, Trials
from experiments.tuning.halving import Candidate, Halving, Judge, Rungs, Values, words
from experiments.tuning.space import Parameter, parameters
from playground.policy import Policy

FRESH = 1000
"""The first of the seeds that confirm."""
OWN = ("sweep=", "+sweep=", "study.", "hydra.", "hydra/", "run_dir=")
OURS = {"workload.requests": "study.requests and study.engine_requests", "seed": "study.seeds and study.fresh"}
LATENCIES = tuple(
    f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for statistic in ("mean", "p50", "p90", "p99")
)
MORE = ("request_throughput", "output_throughput", "request_goodput", "slo_attainment")
"""Of these more is better."""
SPACE = {"policy.budget.tokens": {"low": 64, "high": 4096, "log": True}}


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A candidate's figure over that of what is set now, paired by seed: geometric mean and its 95 % interval.

    Not numbers where a figure of a seed is 0, which no ratio tells.
    """

    values: Values
    where: str
    ratio: float
    low: float
    high: float

    def better(self, more: bool) -> bool:
        """By more than chance."""
        return self.low > 1 if more else self.high < 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """`space`: by option, `{low, high, log}` (whole numbers if both are) or `{choices: [...]}`.

    `trials` candidates, `batch` at a time, climb `rungs`: the top one has `requests`, each below `factor` times less. A
    candidate's figure is the mean of `metric` over `seeds`. The best `survivors` and what is set now are then compared
    on `fresh` other seeds; with `engine`, options by name, they serve `engine_requests` on that, too, one by one.
    """

    space: Mapping[str, Any] | None = None
    metric: str = "mean_e2el_ms"
    trials: int = 24
    batch: int = 8
    rungs: int = 3
    factor: int = 3
    requests: int = 270
    seeds: int = 2
    survivors: int = 3
    fresh: int = 5
    engine: Mapping[str, Any] | None = None
    engine_requests: int = 24
    search_seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        least = {"trials": 2, "batch": 2, "seeds": 1, "survivors": 1, "fresh": 2, "engine_requests": 1, "workers": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"study.{name}={value} must be at least {bound}")
        if self.metric not in (*LATENCIES, *MORE):
            raise ValueError(f"study.metric={self.metric} must be one of {', '.join((*LATENCIES, *MORE))}")

    @property
    def more(self) -> bool:
        return self.metric in MORE

    def run(self, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
        """Search, confirm, write `tuning.json`; what there is to say in one JSON line. The same folder goes on."""
        _check_installed()
        space = parameters(SPACE if self.space is None else self.space)
        base = _base(overrides, space)
        now = _now(space, base)
        if self.space is None and not now:
            raise SettingError("study.space is not set, and the policy has no policy.budget.tokens: say what to search")
        rungs = Rungs(self.requests, self.factor, self.rungs)
        with shown("optuna") as tell:
            progress: Progress = lambda done, total: tell(done, total, "runs of this batch")  # noqa: E731
            judge = Judge(base, self.metric, self.more, range(self.seeds), Trials(folder, self.workers), progress)
            halving = Halving(space, rungs, judge, self.trials, self.batch, self.search_seed, now)
            found = halving.run(lambda line: print(line, file=sys.stderr, flush=True))
            alive = [one for one in found if isfinite(one.value)]
            if not alive:
                raise SettingError(f"study: no candidate could serve; the first: {found[0].why}")
            chosen = [one.values for one in alive if one.values != now][: self.survivors]
            confirmed = self._confirmed(judge, now or {}, chosen, self.requests, "simulated")
            if self.engine:
                alone = Trials(folder / "engine", 1)  # or they would measure each other
                there = [f"{option}={value}" for option, value in self.engine.items()]
                engine = replace(judge, base=(*base, *there), trials=alone)
                confirmed += self._confirmed(engine, now or {}, chosen, self.engine_requests, "on the engine")
        content = self._content(found, now, confirmed)
        provenance.write(folder / "tuning.json", content | provenance.facts())
        print(told(content))
        print(f"All candidates: {folder / 'tuning.json'}")
        return {"run_dir": str(folder)} | {name: content[name] for name in ("metric", "better", "best", "now")}

    def _confirmed(
        self, judge: Judge, now: Values, chosen: Sequence[Values], requests: int, where: str
    ) -> list[Confirmed]:
        """On seeds that the search did not see, against what is set now."""
        seeds = range(FRESH, FRESH + self.fresh)
        runs = [judge.run(values, requests, seed) for values in (now, *chosen) for seed in seeds]
        figures = [judge.figure(trial) for trial in judge.trials.run(runs, judge.progress)]
        if why := next((why for _, why in figures if why), ""):
            raise SettingError(f"{where}, while confirming: {why}")
        each = len(seeds)
        rows = [[value for value, _ in figures[at : at + each]] for at in range(0, len(figures), each)]
        return [Confirmed(values, where, *_over(mine, rows[0])) for values, mine in zip(chosen, rows[1:], strict=True)]

    def _content(
        self, found: Sequence[Candidate], now: Values | None, confirmed: Sequence[Confirmed]
    ) -> dict[str, Any]:
        simulated = [one for one in confirmed if one.where == "simulated" and not isnan(one.ratio)]
        best = (max if self.more else min)(simulated, key=lambda one: one.ratio, default=None)
        everywhere = [one for one in confirmed if best and one.values == best.values]
        sure = bool(everywhere) and all(one.better(self.more) for one in everywhere)
        return {
            "metric": self.metric,
            "more_is_better": self.more,
            "now": dict(now) if now else None,
            "better": sure,
            "best": dict(best.values) if best else None,
            "confirmed": [_finite(asdict(one)) for one in confirmed],
            "candidates": [
                _finite(asdict(one) | {"requests": self.requests // self.factor ** (self.rungs - 1 - one.reached)})
                for one in found
            ],
        }


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}


def _check_installed() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise SettingError(f"sweep=optuna needs Optuna: pip install -e '.[search]' ({error})") from error


def _base(overrides: Sequence[str], space: Sequence[Parameter]) -> Overrides:
    """What the user set for all runs."""
    base = tuple(one for one in overrides if not one.startswith(OWN))
    for one in base:
        key = one.lstrip("+").partition("=")[0]
        if key in OURS:
            raise SettingError(f"{one}: a search has its own: {OURS[key]}")
    composed(list(base))  # a wrong word is told before anything runs
    return base


def _now(space: Sequence[Parameter], base: Overrides) -> Values | None:
    """What is set for the parameters searched, where the space holds all of it."""
    config = composed(list(base))
    roots = {"policy": make("policy", OmegaConf.to_container(config.policy, resolve=True), Policy)}
    found: dict[str, Any] = {}
    for one in space:
        # Defaults are told by parts, not by their configuration.
        first, *path = one.option.lstrip("+").split(".")
        root = roots.get(first) or getattr(read(config), first, None)
        value = reduce(lambda part, name: getattr(part, name, None), path, root)
        if not one.holds(value):
            return None
        found[one.option] = value
    return found


def _over(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Ratio with its interval."""
    if min(*mine, *other) <= 0:
        return nan, nan, nan
    logs = [log(one / two) for one, two in zip(mine, other, strict=True)]
    low, high = over_seeds(logs)
    return exp(mean(logs)), exp(low), exp(high)


def told(content: Mapping[str, Any]) -> str:
    """For people."""
    side = "more" if content["more_is_better"] else "less"
    against = words(content["now"]) if content["now"] else "outside of the space, or not one value"
    lines = [f"{content['metric']} ({side} is better), over what is set now ({against}):"]
    for one in content["confirmed"]:
        ratio = "-" if one["ratio"] is None else f"x {one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        lines.append(f"  {words(one['values']):44} {ratio:26} {one['where']}, fresh seeds")
    if content["better"]:
        return "\n".join([*lines, f"better than what is set now: {words(content['best'])}"])
    near = f" (nearest: {words(content['best'])})" if content["best"] else ""
    return "\n".join([*lines, f"nothing is surely better than what is set now{near}"])
