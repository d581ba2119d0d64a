"""How the unknowns of an engine are fitted, on rows marked `fit` and on no other.

    TPOT lacking = base + per_sequence * sequences        least squares of relative errors, none negative
    eager, by engine and model                            the best of `EAGER`
    latency, by front end                                 the best of `LATENCIES` for all behind it; then eager anew

Best by mean size of log(predicted / measured) over TTFT and TPOT, a row far off counting as one off by a factor of e.
The host's share is fitted anew for each value that is tried. Static batches have no front end, and their first step is
their TTFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments.groundtruth.calibration import Calibration, Unknowns
from experiments.groundtruth.case import Case, Metrics
from experiments.groundtruth.serving import ClosedLoad, Serving
from experiments.groundtruth.static import Batch

EAGER = (6e-5, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3)
LATENCIES = (5e-3, 1e-2, 2e-2, 3e-2, 4e-2)
"""Seconds, both."""
Ask = tuple[Case, Unknowns]
Predict = Callable[[Sequence[Ask]], list[Metrics]]
"""Predictions of cases with these unknowns, in order."""
ENOUGH, MOST, LONGEST = 3, 9, 40_000
"""Rows of an engine: below the first a fit says nothing, above the second it takes long. Output tokens that all users
together are sent: where enough rows have fewer, those with more are left out, as they take long."""


class _Tried(NamedTuple):
    """One engine: what was tried, and how far off it was then."""

    unknowns: Unknowns
    error: float


Engines = dict[str, list[Case]]
"""Rows of the engines behind one front end, by name."""


def fit(cases: Iterable[Case], predict: Predict) -> Calibration:
    """Of every engine that has enough rows marked `fit`."""
    by_engine: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.split == "fit" and _tells(case):
            by_engine.setdefault(_names(case), []).append(case)
    rows = {names: _thinned(found) for names, found in by_engine.items() if len(found) >= ENOUGH}
    calibration: dict[str, Unknowns] = {}
    for front in dict.fromkeys(front for front, _ in rows):
        behind = {name: found for (its, name), found in rows.items() if its == front}
        calibration |= _fit_front(behind, LATENCIES if front else (0.0,), predict)
    return calibration


def _names(case: Case) -> tuple[str, str]:
    """Of the front end and of the engine."""
    assert isinstance(case.trial, Serving | Batch)
    return case.trial.front if isinstance(case.trial, Serving) else "", case.trial.name


def _tells(case: Case) -> bool:
    """Where a queue forms, or physics is beaten, no host time can be read off."""
    possible = all(case.measured[name] >= least for name, least in case.trial.floor().items())
    return isinstance(case.trial, Serving | Batch) and case.load != "saturated" and possible


def _thinned(rows: list[Case]) -> list[Case]:
    """At most `MOST`, evenly spread over the list."""
    short = [case for case in rows if _tokens(case) <= LONGEST]
    rows = short if len(short) >= ENOUGH else rows
    return rows[:: -(-len(rows) // MOST)]


def _tokens(case: Case) -> int:
    load = case.trial.load if isinstance(case.trial, Serving) else None
    return load.users * load.output if isinstance(load, ClosedLoad) else 0


def _fit_front(engines: Engines, latencies: Sequence[float], predict: Predict) -> dict[str, Unknowns]:
    found = _hosts(engines, dict.fromkeys(engines, Unknowns(latency=latencies[len(latencies) // 2])), predict)
    found = _launches(engines, found, predict)
    if len(latencies) > 1:
        found = _launches(engines, _way(engines, found, latencies, predict), predict)
    return _hosts(engines, found, predict)


def _launches(engines: Engines, found: dict[str, Unknowns], predict: Predict) -> dict[str, Unknowns]:
    """Each engine's best time to launch a layer."""
    values = EAGER if all(isinstance(case.trial, Serving) for rows in engines.values() for case in rows) else EAGER[:1]
    tried = _tried(engines, [{n: replace(one, eager=value) for n, one in found.items()} for value in values], predict)
    return {name: min((one[name] for one in tried), key=lambda one: one.error).unknowns for name in engines}


def _way(
    engines: Engines, found: dict[str, Unknowns], latencies: Sequence[float], predict: Predict
) -> dict[str, Unknowns]:
    """The front end's best latency, each row counting alike."""
    tried = _tried(
        engines, [{n: replace(one, latency=value) for n, one in found.items()} for value in latencies], predict
    )
    best = min(tried, key=lambda one: sum(one[name].error * len(rows) for name, rows in engines.items()))
    return {name: one.unknowns for name, one in best.items()}


def _tried(engines: Engines, choices: Sequence[dict[str, Unknowns]], predict: Predict) -> list[dict[str, _Tried]]:
    """All are asked at once: cores idle at the end of a call."""
    asks = [(case, choice[name]) for choice in choices for name, rows in engines.items() for case in rows]
    answers = iter(predict(asks))
    return [
        {name: _judged(rows, choice[name], [next(answers) for _ in rows]) for name, rows in engines.items()}
        for choice in choices
    ]


def _judged(rows: Sequence[Case], unknowns: Unknowns, predicted: Sequence[Metrics]) -> _Tried:
    """With the host's share that these predictions ask for: TPOT follows it, TTFT is taken not to."""
    fitted = _with_host(rows, unknowns, predicted)
    more = [
        fitted.base - unknowns.base + (fitted.per_sequence - unknowns.per_sequence) * _sequences(case) for case in rows
    ]
    tpot = [p["tpot"] + step for p, step in zip(predicted, more, strict=True)]
    errors = [*_logs(rows, "ttft", [p["ttft"] for p in predicted]), *_logs(rows, "tpot", tpot)]
    return _Tried(fitted, float(np.mean(errors)))


def _logs(rows: Sequence[Case], metric: str, predicted: Sequence[float]) -> list[float]:
    ratios = [value / case.measured[metric] for case, value in zip(rows, predicted, strict=True)]
    return [min(abs(float(np.log(max(ratio, 1e-9)))), 1.0) for ratio in ratios]


def _hosts(engines: Engines, unknowns: dict[str, Unknowns], predict: Predict) -> dict[str, Unknowns]:
    """What the rows' TPOT still lacks is the host's. Twice: users who wait for one another change with it."""
    for _ in range(2):
        answers = iter(predict([(case, unknowns[name]) for name, rows in engines.items() for case in rows]))
        unknowns = {
            name: _with_host(rows, unknowns[name], [next(answers) for _ in rows]) for name, rows in engines.items()
        }
    return unknowns


def _with_host(rows: Sequence[Case], unknowns: Unknowns, predicted: Sequence[Metrics]) -> Unknowns:
    lacking = np.array([case.measured["tpot"] - p["tpot"] for case, p in zip(rows, predicted, strict=True)])
    measured = np.array([case.measured["tpot"] for case in rows])
    base, per_sequence = _least_relative(np.array([_sequences(case) for case in rows]), lacking, measured)
    return replace(
        unknowns,
        base=max(0.0, unknowns.base + base),
        per_sequence=max(0.0, unknowns.per_sequence + per_sequence),
    )


def _sequences(case: Case) -> float:
    trial = case.trial
    if isinstance(trial, Batch):
        return trial.size
    assert isinstance(trial, Serving) and isinstance(trial.load, ClosedLoad)
    return trial.load.users


def _least_relative(x: np.ndarray, lacking: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """a, b of lacking = a + b x: relative errors, reweighted from least squares towards least absolute ones.

    A row far off (other flags than assumed, a wrong measurement) must not move the rest.
    """
    y = lacking / measured
    design = np.stack([np.ones_like(x), x], axis=1) / measured[:, None]
    weights = np.ones_like(y)
    for _ in range(30):
        root = np.sqrt(weights)
        solution, *_ = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)
        weights = 1 / np.maximum(np.abs(y - design @ solution), 0.02)
    return float(solution[0]), float(solution[1])
