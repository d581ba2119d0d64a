"""The kit for other people's repositories: `pytest --policy=my.module:make`, and the fixture `conformance`.

With `--policy` (as often as there are policies) pytest collects one test for each property of each of them. The fixture
examines a policy within a test of yours:

    def test_mine(conformance):
        conformance(lambda: MyPolicy(rows=4), only=("stall", "starvation"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # whoever does not examine anything has nothing to wait for
    from playground.check.case import Make
    from playground.check.examination import Report, Verdict
    from playground.check.properties import Limits


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "examine scheduling policies (python -m playground.check --help)")
    told = "a policy to examine: its name, or my.module:make; with spaces between, its options (may be repeated)"
    group.addoption("--policy", action="append", default=[], metavar="POLICY", help=told)
    group.addoption("--policy-cases", type=int, default=3, metavar="N", help="cases of each kind (default 3)")


class Failed(AssertionError):
    """A property that does not hold, with its smallest case."""


def pytest_collection(session: pytest.Session) -> None:
    """Wrong options are told before anything runs."""
    if (each := session.config.getoption("--policy-cases")) < 1:
        raise pytest.UsageError(f"--policy-cases {each} must be at least 1")


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    policies: Sequence[str] = session.config.getoption("--policy")
    for words in policies:
        items.extend(_collected(session, words, session.config.getoption("--policy-cases")))


def _collected(session: pytest.Session, words: str, each: int) -> Iterator[pytest.Item]:
    from experiments.conformance import factory
    from experiments.errors import explain
    from playground.check.properties import PROPERTIES

    name, *options = words.split()
    try:
        make = factory([f"policy={name}", *options])
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        raise pytest.UsageError(f"--policy={words}: {line}") from error
    examination = Examination.from_parent(session, name=words, make=make, each=each)
    for property in PROPERTIES:
        yield Judged.from_parent(examination, name=property.name)


class Examination(pytest.Collector):
    """One policy. It is examined when the first of its properties is asked for."""

    def __init__(self, *, make: Make, each: int, **more: Any) -> None:
        super().__init__(nodeid=more["name"], **more)
        self.examined: Callable[[], Report] = cache(lambda: _examine(make, each, self._asked(), None))

    def _asked(self) -> list[str]:
        """Properties that are left after -k and the like."""
        return [item.name for item in self.session.items if item.parent is self]

    def collect(self) -> Iterable[pytest.Item]:
        return ()


class Judged(pytest.Item):
    """One property of one policy."""

    def runtest(self) -> None:
        assert isinstance(self.parent, Examination)
        verdict = next(one for one in self.parent.examined().verdicts if one.property.name == self.name)
        if verdict.problem:
            raise Failed(_told(verdict, self.config, self.parent.name))
        if not verdict.judged:
            pytest.skip("no case is about it")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The case, not the frames of this file."""
        return str(excinfo.value) if isinstance(excinfo.value, Failed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        assert self.parent
        return "playground.check", None, f"{self.parent.name}: {self.name}"


@pytest.fixture(scope="session")
def conformance(pytestconfig: pytest.Config) -> Callable[..., Report]:
    """Examines what `make` makes and fails with the smallest case of the first property that does not hold.

    `conformance(make, each=3, only=(), limits=None)`: so many cases of each kind; the named properties (all); other
    bounds (`playground.check.properties.Limits`). Returns the `Report`.
    """

    def examined(make: Make, each: int = 3, only: Sequence[str] = (), limits: Limits | None = None) -> Report:
        report = _examine(make, each, only, limits)
        if report.failed:
            raise Failed(_told(report.failed[0], pytestconfig, ""))
        return report

    return examined


def _examine(make: Make, each: int, only: Sequence[str], limits: Limits | None) -> Report:
    from playground.check.examination import examine
    from playground.check.properties import PROPERTIES, named

    return examine(make, each, properties=named(only) if only else PROPERTIES, limits=limits)


def _told(verdict: Verdict, config: pytest.Config, words: str) -> str:
    """What fails, the case, and how to play it again: it is kept in pytest's cache. `words`: the policy's, if known."""
    case, name = verdict.case, verdict.property.name
    told = [f"{name}: {verdict.property.meaning}", verdict.problem]
    if case is not None:
        told += [str(case), *(f"  {line}" for line in case.lines())]
        if file := _kept(verdict, config, words):
            told.append(f"python -m playground.check replay {file}{'' if words else ' policy=MODULE:MAKE'}")
    return "\n".join(told)


def _kept(verdict: Verdict, config: pytest.Config, words: str) -> Path | None:
    from playground.check.case import Saved, save

    if verdict.case is None or getattr(config, "cache", None) is None:
        return None
    plain = "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in words)
    file = config.cache.mkdir("conformance") / f"{plain or 'policy'}-{verdict.property.name}.json"
    name, *options = words.split() or [""]
    save(file, Saved((f"policy={name}", *options), verdict.property.name, verdict.problem, verdict.case))
    return Path(os.path.relpath(file))
