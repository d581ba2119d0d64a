"""Cases and cost models in, rows out: each case predicted by each model, with the unknowns that were fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.groundtruth.calibration import NOTHING, Calibration, Unknowns
from experiments.groundtruth.case import Case, Metrics, Trial, Unsupported
from experiments.groundtruth.pool import Pool
from experiments.groundtruth.serving import ClosedLoad


@dataclass(frozen=True, slots=True)
class Row:
    """One case, predicted one way. `errors`: predicted / measured - 1. `impossible`: metrics measured below what the
    device's sheet allows, which nobody can predict."""

    source: str
    name: str
    split: str
    engine: str
    model: str
    device: str
    tp: int
    load: str
    assumed: str
    cost: str
    fitted: bool
    measured: Metrics
    predicted: Metrics
    errors: Metrics
    impossible: tuple[str, ...]

    @classmethod
    def of(cls, case: Case, cost: str, fitted: bool, predicted: Metrics) -> Row:
        errors = {name: predicted[name] / value - 1 for name, value in case.measured.items() if name in predicted}
        return cls(
            case.source,
            case.name,
            case.split,
            case.engine,
            case.model,
            case.device,
            case.tp,
            case.load,
            case.assumed,
            cost,
            fitted,
            case.measured,
            predicted,
            errors,
            impossible(case),
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What one process is asked."""

    trial: Trial
    cost: str
    unknowns: Unknowns | None
    """None: nothing fitted."""


def replay(cases: Sequence[Case], costs: Iterable[str], fits: Mapping[str, Calibration], pool: Pool) -> list[Row]:
    """Every case by every cost model that knows its hardware, with the engine's unknowns where they were fitted."""
    asked = [(case, _question(case, cost, fits.get(cost, NOTHING))) for cost in costs for case in cases]
    answers = ask("replaying", [question for _, question in asked], pool)
    return [
        Row.of(case, question.cost, question.unknowns is not None, predicted)
        for (case, question), predicted in zip(asked, answers, strict=True)
        if predicted is not None
    ]


def ask(title: str, questions: Sequence[Question], pool: Pool) -> list[Metrics | None]:
    """In order of the questions. What was measured more than once is predicted once; what takes longest comes first,
    so that no core waits for it at the end."""
    distinct = sorted(dict.fromkeys(questions), key=lambda question: -_size(question.trial))
    known = dict(zip(distinct, pool.map(title, answer, distinct), strict=True))
    return [known[question] for question in questions]


def _size(trial: Trial) -> int:
    """Tokens that a closed loop makes: what its time goes with."""
    load = getattr(trial, "load", None)
    return load.users * load.output if isinstance(load, ClosedLoad) else 0


def answer(question: Question) -> Metrics | None:
    """None where the cost model has no answer."""
    name = getattr(question.trial, "name", "")
    calibration = {name: question.unknowns} if question.unknowns else NOTHING
    try:
        return question.trial.predict(question.cost, calibration)
    except Unsupported:
        return None


def impossible(case: Case) -> tuple[str, ...]:
    """Metrics that were measured shorter than the sheet allows."""
    return tuple(name for name, least in case.trial.floor().items() if case.measured.get(name, least) < least)


def from_json(content: Mapping[str, Any]) -> Row:
    return Row(**{**content, "impossible": tuple(content["impossible"])})


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)


def _question(case: Case, cost: str, calibration: Calibration) -> Question:
    return Question(case.trial, cost, calibration.get(getattr(case.trial, "name", "")))
