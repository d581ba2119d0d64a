"""Cases and cost models in, rows out: each case predicted by each model, before and after the unknowns are fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.groundtruth.calibration import NOTHING, Calibration, Unknowns
from experiments.groundtruth.case import Case, Metrics, Unsupported
from experiments.groundtruth.pool import Pool


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

    case: Case
    cost: str
    unknowns: Unknowns | None
    """None: nothing fitted."""


def replay(cases: Sequence[Case], costs: Iterable[str], fits: Mapping[str, Calibration], pool: Pool) -> list[Row]:
    """Every case by every cost model that knows its hardware; twice where the engine's unknowns were fitted."""
    questions = [
        question for cost in costs for case in cases for question in _questions(case, cost, fits.get(cost, NOTHING))
    ]
    answers = pool.map("replaying", answer, questions)
    return [
        Row.of(question.case, question.cost, question.unknowns is not None, predicted)
        for question, predicted in zip(questions, answers, strict=True)
        if predicted is not None
    ]


def answer(question: Question) -> Metrics | None:
    """None where the cost model has no answer."""
    name = getattr(question.case.trial, "name", "")
    calibration = {name: question.unknowns} if question.unknowns else NOTHING
    try:
        return question.case.trial.predict(question.cost, calibration)
    except Unsupported:
        return None


def impossible(case: Case) -> tuple[str, ...]:
    """Metrics that were measured shorter than the sheet allows."""
    return tuple(name for name, least in case.trial.floor().items() if case.measured.get(name, least) < least)


def from_json(content: Mapping[str, Any]) -> Row:
    return Row(**{**content, "impossible": tuple(content["impossible"])})


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)


def _questions(case: Case, cost: str, calibration: Calibration) -> list[Question]:
    unknowns = calibration.get(getattr(case.trial, "name", ""))
    plain = Question(case, cost, None)
    return [plain, Question(case, cost, unknowns)] if unknowns else [plain]
