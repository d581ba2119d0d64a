"""How the unknowns of an engine are fitted, on rows marked `fit` and on no other.

    TPOT lacking = base + per_sequence * sequences        least squares of relative errors, none negative
    max_tokens, then service                              the best of a few, by median error of TTFT and TPOT

The host's share is fitted for the given budget first, and again for the one that was found. Static batches have no
front end and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from experiments.groundtruth.calibration import Calibration, Unknowns
from experiments.groundtruth.case import Case, Metrics
from experiments.groundtruth.serving import ClosedLoad, Serving
from experiments.groundtruth.static import Batch

BUDGETS = (2048, 8192)
SERVICES = (0.0, 2e-3)
"""Seconds."""
Ask = tuple[Case, Unknowns]
Predict = Callable[[Sequence[Ask]], list[Metrics]]
"""Predictions of cases with these unknowns, in order."""


def fit(cases: Iterable[Case], predict: Predict) -> Calibration:
    """Of every engine that has enough rows marked `fit`."""
    by_engine: dict[str, list[Case]] = {}
    for case in cases:
        if case.split == "fit" and _tells(case):
            by_engine.setdefault(_engine(case), []).append(case)
    return {name: _fit_engine(_thinned(rows), predict) for name, rows in by_engine.items() if len(rows) >= ENOUGH}


def _engine(case: Case) -> str:
    assert isinstance(case.trial, Serving | Batch)
    return case.trial.name


def _tells(case: Case) -> bool:
    """Where a queue forms, or physics is beaten, no host time can be read off."""
    possible = all(case.measured[name] >= least for name, least in case.trial.floor().items())
    return isinstance(case.trial, Serving | Batch) and case.load != "saturated" and possible


ENOUGH, MOST = 3, 12
"""Rows: below that a fit says nothing, above that it takes long."""


def _thinned(rows: list[Case]) -> list[Case]:
    """At most `MOST`, evenly spread over the list."""
    return rows[:: -(-len(rows) // MOST)]


def _fit_engine(rows: Sequence[Case], predict: Predict) -> Unknowns:
    start = _with_host(rows, _with_host(rows, Unknowns(service=SERVICES[1]), predict), predict)
    if not all(isinstance(case.trial, Serving) for case in rows):
        return replace(start, service=0.0)
    found = _best(rows, [replace(start, max_tokens=budget) for budget in _budgets(rows)], predict)
    found = _best(rows, [replace(found, service=service) for service in SERVICES], predict)
    return _with_host(rows, found, predict)


def _best(rows: Sequence[Case], tried: Sequence[Unknowns], predict: Predict) -> Unknowns:
    answers = predict([(case, unknowns) for unknowns in tried for case in rows])
    scores = [_score(rows, answers[at : at + len(rows)]) for at in range(0, len(answers), len(rows))]
    return tried[int(np.argmin(scores))]


def _budgets(rows: Sequence[Case]) -> list[int]:
    """Those that hold a whole prompt, where the engine does not cut them."""
    trials = [case.trial for case in rows if isinstance(case.trial, Serving)]
    least = max((_prompt(trial) for trial in trials if trial.engine.discipline == "sglang"), default=0)
    return [budget for budget in BUDGETS if budget >= least]


def _prompt(trial: Serving) -> int:
    return trial.load.prompt if isinstance(trial.load, ClosedLoad) else 0


def _score(rows: Sequence[Case], predicted: Sequence[Metrics]) -> float:
    return sum(
        float(
            np.median(
                [abs(answer[name] / case.measured[name] - 1) for case, answer in zip(rows, predicted, strict=True)]
            )
        )
        for name in ("ttft", "tpot")
    )


def _with_host(rows: Sequence[Case], unknowns: Unknowns, predict: Predict) -> Unknowns:
    """What the rows' TPOT still lacks is the host's."""
    predicted = predict([(case, unknowns) for case in rows])
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
