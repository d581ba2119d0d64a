"""Tables of docs/conformance.md, from recorded surveys: `experiments/benchmarks/results/mutants.json`.

The record is {"surveys": [RESULT, ...]}; to each lawful mutant a person has written `why`, once it was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.benchmarks.layout import table
from experiments.mutants.survey import DEAD, FOUND, HANGS, LAWFUL, UNASKED, WITHOUT

Record = Mapping[str, Any]
VERDICTS = {
    FOUND: "found: a property fails that held before",
    LAWFUL: "lawful: decides otherwise, every property holds as before",
    WITHOUT: "no effect: every decision in every case as before",
    DEAD: "cannot be made: an exception before any case",
    HANGS: "does not return",
    UNASKED: "not examined: the part will have none of the cases",
}


def _counts(record: Record) -> str:
    surveys = record["surveys"]
    head = ["", *(survey["of"] for survey in surveys)]
    rows = [
        [told, *(str(sum(one["verdict"] == verdict for one in survey["mutants"])) for survey in surveys)]
        for verdict, told in VERDICTS.items()
    ]
    return table(head, rows)


def _found(record: Record) -> str:
    """Each mutant once, at the first property that tells it."""
    return _grouped("found by", record, FOUND, lambda one: f"`{next(iter(one['failed']))}`")


def _missed(record: Record) -> str:
    return _grouped("lawful, because", record, LAWFUL, lambda one: str(one["why"]))


def _grouped(head: str, record: Record, verdict: str, by: Callable[[Record], str]) -> str:
    groups = defaultdict(list)
    for survey in record["surveys"]:
        for one in survey["mutants"]:
            if one["verdict"] == verdict:
                groups[by(one)].append(one)
    rows = [
        [why, _examples(group), str(len(group))]
        for why, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return table([head, "for example", "mutants"], rows)


def _examples(group: Iterable[Record], most: int = 1) -> str:
    """The shortest: a line of a table holds it."""
    shortest = sorted(group, key=lambda one: (len(one["before"] + one["after"]), one["module"], one["line"]))[:most]
    return "; ".join(f"{one['owner']}: {_code(one['before'])} to {_code(one['after'])}" for one in shortest)


def _code(text: str) -> str:
    """In a cell bars end it."""
    return "`" + text.replace("|", "\\|") + "`"


MUTANTS: Mapping[str, Callable[[Record], str]] = {
    "mutants": _counts,
    "mutants_found": _found,
    "mutants_missed": _missed,
}
