"""One case, served under the eyes of the laws: what came of it, whatever goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import extract_tb

from playground.check.case import Case, Make
from playground.check.laws import Broken, Laws, hold
from playground.check.watch import Seen, watched
from playground.core import Done, Step
from playground.loop import Stuck, serve
from playground.scheduler import Ended, Event, Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.workload.source import OpenLoop


class Refused(ValueError):
    """The policy does nothing on such a backend, and says so."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What broke first in a run, and which property that is."""

    property: str
    what: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a run left. With a `problem` it ends there."""

    problem: Problem | None
    seen: Seen
    log: tuple[Step | Done, ...]
    """Launches and completions in their order."""
    events: tuple[Event, ...]
    ended: dict[int, Ended]
    limit: int
    """Steps that might be in flight."""

    @property
    def steps(self) -> list[Step]:
        return [entry for entry in self.log if isinstance(entry, Step)]

    @property
    def repeated(self) -> int:
        """Steps, repetitions counted one by one."""
        return sum(entry.count for entry in self.log if isinstance(entry, Done))


class Logged(Laws):
    """Laws that keep launches and completions in one list."""

    def __init__(self, case: Case, scheduler: Scheduler) -> None:
        super().__init__(case.spec, scheduler, endless=6 * case.tokens + 200)
        self.log: list[Step | Done] = []

    def launched(self, step: Step, group: object) -> None:
        self.log.append(step)
        super().launched(step, group)  # type: ignore[arg-type]

    def committed(self, done: Done, step: Step) -> None:
        self.log.append(done)
        super().committed(done, step)


def attend(case: Case, make: Make) -> Outcome:
    """Serve the case. Raises `Refused` if the policy will not have such a backend."""
    policy = watched(make(), case.run_ahead)
    try:
        scheduler = Scheduler(case.spec, policy, case.seed, case.prefix_cache, case.requeue, *case.reports)
    except ValueError as error:
        raise Refused(str(error)) from error
    laws = Logged(case, scheduler)
    backend = SimBackend(case.spec, Modelled(Linear(case.seconds, case.per_token), case.spec.stages))
    ordered = sorted(case.requests, key=lambda request: (request.arrival, request.id))
    problem = None
    try:
        serve(OpenLoop(ordered, case.aborts), scheduler, backend, laws)
        laws.finish(case.requests)
        _hold_aborts(case, laws.outcomes)
    except Exception as error:  # noqa: BLE001  (a policy under examination may raise anything)
        problem = _problem(error)
    return Outcome(problem, policy.seen, tuple(laws.log), tuple(laws.events), laws.outcomes, scheduler.limit)


def _hold_aborts(case: Case, outcomes: dict[int, Ended]) -> None:
    """Who goes away in time is served no further."""
    for at, id in case.aborts:
        ended = outcomes[id]
        late = ended.finished > at and ended.outcome != "aborted"
        hold("ends", not late, f"request {id} went away at {at:g} s and was {ended.outcome} at {ended.finished:g} s")


def _problem(error: Exception) -> Problem:
    """Which property an error breaks. What the core raises by itself is about blocks or limits."""
    if isinstance(error, Broken):
        return Problem(error.law, str(error))
    if isinstance(error, Stuck):
        return Problem("stall", str(error))
    frame = extract_tb(error.__traceback__)[-1]
    core = any(part in frame.filename for part in ("playground/kv.py", "playground/rank.py", "playground/sequence.py"))
    if core and isinstance(error, AssertionError | RuntimeError | MemoryError):
        return Problem("blocks", str(error))
    if isinstance(error, ValueError) and frame.name == "_check_limits":
        return Problem("limits", str(error))
    where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return Problem("errors", f"{type(error).__name__}: {error} ({where})")
