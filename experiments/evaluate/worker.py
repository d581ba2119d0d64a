"""The process that an evaluated policy runs in: the conformance kit first, then the cases. Answers in a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from math import exp, isnan, log
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from analysis.intervals import over_seeds
from experiments.conformance import factory
from experiments.errors import explain
from experiments.evaluate.contract import Asked
from experiments.evaluate.suite import BASELINE, SPLITS
from experiments.settings import SettingError
from experiments.trials import Trial, Trials
from playground.check.case import Make
from playground.check.examination import QUICK, examine
from playground.check.serving import Refused
from playground.oracle import oracles


class Worthless(Exception):
    """The policy scores nothing; `failed`: properties that do not hold."""

    def __init__(self, why: str, failed: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.failed = failed or {}


def main(question: str, answer: str) -> None:
    """`question`: an `Asked` as JSON; `answer`: the file that the result goes to."""
    asked = Asked(**json.loads(question))
    found = answered(asked)
    file = Path(answer)
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(found), encoding="utf-8")
    os.replace(whole, file)


def answered(asked: Asked) -> dict[str, Any]:
    """The fields of an evaluation that only running the policy can tell; or the caller's `mistake`."""
    try:
        _importable(asked)
        make = factory(asked.words)
        return _scored(asked, make)
    except Worthless as reason:
        return {"why": str(reason), "failed": reason.failed}
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        return {"mistake": line}


def _importable(asked: Asked) -> None:
    """A policy's file goes by its own name, which must be nobody else's."""
    if not asked.path:
        return
    target = next(word for word in asked.words if word.startswith("policy._target_="))
    module = target.partition("=")[2].rpartition(".")[0]
    if find_spec(module) is not None and not _is(module, asked.path):
        raise SettingError(f"{module}.py: there is another module of that name: rename the file")
    sys.path.insert(0, asked.path)


def _is(module: str, path: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == Path(path)


def _scored(asked: Asked, make: Make) -> dict[str, Any]:
    _conform(make, asked.excused)
    trials = _served(asked)
    rows, logs = [], []
    for (case, seed), (mine, plain) in trials.items():
        value, beside = _value(asked, case, mine), _value(asked, case, plain)
        rows.append({"case": case, "seed": seed, "value": value, "baseline": beside, "ratio": beside / value})
        logs.append(log(beside / value))
    low, high = over_seeds(logs)
    return {
        "score": exp(mean(logs)),
        "interval": None if isnan(low) else (exp(low), exp(high)),
        "cases": rows,
    }


def _conform(make: Make, excused: Sequence[str]) -> None:
    if told := oracles(make()):
        raise Worthless(f"{type(told[0]).__name__} is told true output lengths, which nobody has in service")
    try:
        report = examine(make, QUICK)
    except Refused as error:
        raise Worthless(f"it will have none of the kit's backends: {error}") from error
    failed = {one.property.name: one.problem for one in report.failed if one.property.name not in excused}
    if failed:
        first, problem = next(iter(failed.items()))
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Worthless(f"the conformance kit: {first} fails: {problem}{more}", failed)


def _served(asked: Asked) -> dict[tuple[str, int], tuple[Trial, Trial]]:
    """By case and seed: the policy's run and the baseline's, of the same requests."""
    mine, plain = ({
        (case.name, seed): overrides
        for case in SPLITS[asked.split]
        for seed, overrides in case.runs(words, asked.seeds).items()
    } for words in (asked.words, BASELINE))  # fmt: skip
    with TemporaryDirectory() as folder:
        trials = Trials(Path(folder), asked.workers)
        found = trials.run([*mine.values(), *plain.values()])
    return {key: (found[number], found[number + len(mine)]) for number, key in enumerate(mine)}


def _value(asked: Asked, case: str, trial: Trial) -> float:
    if trial.problem:
        raise Worthless(f"{case}: {trial.problem}")
    if turned_away := trial.summary["rejected"]:
        raise Worthless(f"{case}: {turned_away} of {trial.summary['requests']} requests were turned away")
    name, statistic = asked.metric.split("_")
    value = trial.summary[f"{statistic}_{name}_ms"]
    if not value or not value > 0:
        raise Worthless(f"{case}: {asked.metric} is {value} ms, which no policy can reach")
    return float(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
