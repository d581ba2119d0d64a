"""Policies beside the best there could have been."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.regret import bounds, exact, rounds
from experiments.regret.problem import Job, Room
from experiments.settings import SettingError, Settings
from playground.core import Request

EXACT, STOPPED, RELAXED = "exact", "lower bound (program stopped)", "lower bound (relaxation)"
MEANINGS = {
    EXACT: "the best schedule without pauses, preemption or cut prompts; proven by the integer program",
    STOPPED: "no schedule without pauses, preemption or cut prompts is better; the program was stopped before its end",
    RELAXED: "no policy is better, whether it pauses, preempts or cuts prompts; how near one can come is not known",
}
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """In rounds, of a mean over requests or a makespan. `reached`: by the best schedule that is known, if any."""

    kind: str
    value: float
    reached: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: its value in rounds, how often it gave up KV, and what it loses to each bound."""

    policy: str
    value: float
    losses: int

    def regret(self, bound: Bound) -> float:
        return self.value - bound.value

    def ratio(self, bound: Bound) -> float:
        return self.value / bound.value


@dataclass(frozen=True, slots=True)
class Regret:
    """Of one seed's requests."""

    metric: str
    jobs: tuple[Job, ...]
    room: Room
    bounds: tuple[Bound, ...]
    rows: tuple[Row, ...]


def compare(
    metric: str,
    wanted: Mapping[str, Settings],
    found: Sequence[Request],
    seconds: float,
    most: int = exact.MOST,
    tell: Told = lambda line: None,
) -> Regret:
    """Every alternative (settings by name) on these requests, against bounds; `most`: requests that are solved for.

    Raises SettingError where alternatives differ in memory, seats or step size: a bound is about one machine.
    """
    rooms = {name: rounds.room(one) for name, one in wanted.items()}
    room = next(iter(rooms.values()))
    for name, other in rooms.items():
        if other != room:
            raise SettingError(f"--each {name}: changes what there is room for ({other}, not {room}); set it for all")
    jobs = tuple(rounds.jobs(found))
    rows = []
    for name, one in wanted.items():
        tell(f"{name}: {len(jobs)} requests in rounds")
        played = rounds.play(one, found)
        rows.append(Row(name, played.values[metric], played.losses))
    return Regret(metric, jobs, room, tuple(bounds_of(metric, jobs, room, seconds, most, tell)), tuple(rows))


def bounds_of(
    metric: str, jobs: Sequence[Job], room: Room, seconds: float, most: int, tell: Told = lambda line: None
) -> list[Bound]:
    """The relaxation's always; the program's where there are few enough."""
    found = [Bound(RELAXED, bounds.least(metric, jobs, room))]
    if len(jobs) > most:
        return found
    tell(f"integer program of {len(jobs)} requests, {seconds:g} s at most")
    solved = exact.solve(metric, jobs, room, seconds)
    return [Bound(EXACT if solved.exact else STOPPED, solved.bound, solved.value), *found]
