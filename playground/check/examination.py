"""The examination: every family of cases, every property, and of each that fails the smallest case that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan

from playground.check.adversaries import FAMILIES, cases
from playground.check.case import Case, Make
from playground.check.properties import PROPERTIES, Finding, Judging, Limits, Property, judged, of_outcome
from playground.check.serving import Outcome, Refused, attend
from playground.check.shrinking import PATIENCE, shrink

QUICK, THOROUGH = 3, 12
"""Cases of each family."""

Progress = Callable[[int, int, str], None]
"""Told (cases served, cases in all, what is being done)."""


@dataclass(slots=True)
class Verdict:
    """A property over all cases: in how many it was judged, its worst value, and the smallest case in which it fails.

    `excused`: why it was not asked at all.
    """

    property: Property
    judged: int = 0
    worst: float = nan
    failed: int = 0
    problem: str = ""
    case: Case | None = None
    """Where it fails, else where its value is worst."""
    excused: str = ""

    def add(self, finding: Finding, case: Case) -> bool:
        """Whether it is the first to fail."""
        self.judged += 1
        worse = not isnan(finding.value) and not finding.value <= self.worst
        if worse:
            self.worst = finding.value
        if not finding.problem:
            if worse and not self.failed:
                self.case = case
            return False
        self.failed += 1
        if self.failed > 1:
            return False
        self.problem, self.case = finding.problem, case
        return True


@dataclass(slots=True)
class Report:
    """What came of an examination. `refused`: why the policy will not have some of the backends, by family."""

    verdicts: list[Verdict]
    served: int = 0
    steps: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    cut: str = ""
    """The property whose failure ended the examination."""

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.problem]


def examine(
    make: Make,
    each: int = THOROUGH,
    seed: int = 0,
    properties: tuple[Property, ...] = PROPERTIES,
    limits: Limits | None = None,
    progress: Progress = lambda done, total, doing: None,
    patience: int = PATIENCE,
) -> Report:
    """Serve `each` cases of every family that a property is asked of, and judge them.

    `patience`: tokens that looking for a smaller case may cost. Raises `Refused` if the policy will have no case.
    """
    limits = limits or Limits()
    verdicts = [Verdict(property) for property in properties]
    report = Report(verdicts)
    families = _families(properties)
    total, refusal = each * len(families), None
    for number, case in enumerate(_interleaved(families, each, seed)):
        progress(number, total, case.family)
        try:
            outcome = attend(case, make)
        except Refused as error:
            refusal = error
            report.refused[case.family] = str(error)
            continue
        report.served += 1
        report.steps += len(outcome.steps)
        _judge(verdicts, Judging(case, outcome, make, limits), partial(progress, number, total), patience)
        report.cut = next((one.property.name for one in report.failed if one.property.fatal), "")
        if report.cut:
            break
    if refusal and not report.served:
        raise refusal
    return report


def _families(properties: tuple[Property, ...]) -> list[str]:
    """All, unless each property says in which it is asked."""
    if not all(property.families for property in properties):
        return list(FAMILIES)
    return [family for family in FAMILIES if any(family in property.families for property in properties)]


def _interleaved(families: list[str], each: int, seed: int) -> Iterator[Case]:
    """A case of every family, then another of every family: what is broken shows early."""
    for together in zip(*[cases(family, each, seed) for family in families], strict=True):
        yield from together


def _judge(verdicts: list[Verdict], judging: Judging, tell: Callable[[str], None], patience: int) -> None:
    for verdict in verdicts:
        if verdict.failed and _compares(verdict.property):
            continue  # it has failed, and each judgement serves the case once more
        finding = of_outcome(verdict.property, judging)
        if finding and verdict.add(finding, judging.case) and not verdict.property.fatal:
            _shrink(verdict, judging, tell, patience)


def _compares(property: Property) -> bool:
    return property.name in ("determinism", "permutation", "steady", "oracle", "priority")


def _shrink(verdict: Verdict, judging: Judging, tell: Callable[[str], None], patience: int) -> None:
    found = verdict.problem

    def fails(case: Case) -> bool:
        nonlocal found
        tell(f"{verdict.property.name} fails, looking for a smaller case")
        try:
            finding = judged(verdict.property, case, judging.make, judging.limits)
        except (Refused, ValueError):  # no such case
            return False
        if finding and finding.problem:
            found = finding.problem
            return True
        return False

    verdict.case = shrink(judging.case, fails, patience)
    verdict.problem = found


def replayed(case: Case, make: Make, property: Property, limits: Limits) -> tuple[Finding | None, Outcome]:
    """One property in one case, and the run in which it was judged."""
    outcome = attend(case, make)
    return of_outcome(property, Judging(case, outcome, make, limits)), outcome


def without_families(property: Property) -> Property:
    """Asked of every case: a saved one may have been edited."""
    return replace(property, families=())
