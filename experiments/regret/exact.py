"""The best schedule in which whoever has begun goes on in every round: an integer program, solved by HiGHS.

x[i, t] = 1 if request i begins in round t. Each begins once; in every round blocks, seats and tokens suffice. It is the
program of MC-SF (arXiv 2502.07115, 2025) with this simulator's accounting. The best of all begins nobody later than the
value of a known schedule leaves time for, which is what keeps it small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from experiments.regret import greedy
from experiments.regret.bounds import EPSILON, least
from experiments.regret.problem import Array, Job, Room, misfit, value
from experiments.settings import SettingError

MOST = 30
"""Requests that are solved for unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Solved:
    """`value` is of the schedule found, `bound` of none below it; they are equal if `exact`. In rounds."""

    value: float
    bound: float
    exact: bool
    starts: tuple[int, ...]


def solve(metric: str, jobs: Sequence[Job], room: Room, seconds: float = 60.0) -> Solved:
    """The least `metric` of schedules without pauses, in so many seconds at most.

    Raises SettingError where a request fits no schedule.
    """
    for job in jobs:
        if why := misfit(job, room):
            raise SettingError(f"{why}: raise kv.blocks or limits.max_tokens, or shorten the workload's lengths")
    first = min(job.arrival for job in jobs)
    moved = [replace(job, arrival=job.arrival - first) for job in jobs]
    known, starts = greedy.best(metric, moved, room)
    lowest = least(metric, moved, room)
    if known <= lowest + EPSILON:
        return Solved(known, known, True, tuple(start + first for start in starts))
    found = _program(metric, moved, room, known, starts, seconds)
    return replace(found, starts=tuple(start + first for start in found.starts), bound=max(found.bound, lowest))


def _windows(metric: str, jobs: Sequence[Job], room: Room, known: float) -> list[range]:
    """Rounds in which each may begin if the whole is to be no worse than what is known."""
    if metric == "makespan":
        return [range(job.arrival, floor(known + EPSILON) - job.output + 1) for job in jobs]
    total = known * len(jobs)
    alone = {"latency": [job.output for job in jobs], "ttft": [1] * len(jobs)}[metric]
    windows = []
    for number, job in enumerate(jobs):
        others = [*jobs[:number], *jobs[number + 1 :]]
        rest = least(metric, others, room) * len(others) if others else 0.0
        delay = floor(total - rest - alone[number] + EPSILON)
        windows.append(range(job.arrival, job.arrival + delay + 1))
    return windows


def _program(
    metric: str, jobs: Sequence[Job], room: Room, known: float, starts: Sequence[int], seconds: float
) -> Solved:
    from scipy.optimize import Bounds, LinearConstraint, milp  # of an extra
    from scipy.sparse import csr_array, vstack

    windows = _windows(metric, jobs, room, known)
    owner = np.concatenate([np.full(len(window), number) for number, window in enumerate(windows)])
    begin = np.concatenate([np.array(window) for window in windows])
    count = len(owner)
    extra = metric == "makespan"  # the last variable: the end of all
    once = csr_array((np.ones(count), (owner, np.arange(count))), shape=(len(jobs), count + extra))
    constraints = [LinearConstraint(once, 1, 1)]
    capacity = np.array([room.blocks, room.seats, room.tokens])
    for row in range(3):
        used = _use(jobs, room, owner, begin, row, count + extra)
        constraints.append(LinearConstraint(used, -np.inf, capacity[row]))
    output = np.array([job.output for job in jobs])
    cost = np.zeros(count + extra)
    if extra:
        cost[-1] = 1
        end = csr_array((begin + output[owner], (owner, np.arange(count))), shape=(len(jobs), count + 1))
        last = csr_array((-np.ones(len(jobs)), (np.arange(len(jobs)), np.full(len(jobs), count))), shape=end.shape)
        constraints.append(LinearConstraint(vstack([end + last]), -np.inf, 0))
    else:
        cost[:] = (begin - np.array([job.arrival for job in jobs])[owner]) / len(jobs)
    upper = np.ones(count + extra)
    upper[count:] = np.inf
    found = milp(
        cost,
        integrality=np.ones(count + extra),
        bounds=Bounds(0, upper),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    return _told(metric, jobs, found, owner, begin, known, starts)


def _use(jobs: Sequence[Job], room: Room, owner: Array, begin: Array, row: int, width: int) -> object:
    """Of one resource: a row for each round, a column for each beginning."""
    from scipy.sparse import csr_array

    wants = [greedy.needs(job, room)[row] for job in jobs]
    lengths = np.array([len(want) for want in wants])[owner]
    columns = np.repeat(np.arange(len(owner)), lengths)
    offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rounds = np.repeat(begin, lengths) + offset
    amounts = np.concatenate([wants[number] for number in owner])
    return csr_array((amounts, (rounds, columns)), shape=(int(rounds.max()) + 1, width))


def _told(
    metric: str, jobs: Sequence[Job], found: object, owner: Array, begin: Array, known: float, starts: Sequence[int]
) -> Solved:
    """Values anew from the starts: the solver's own are off by its tolerance."""
    result: object = found
    status, solution = getattr(result, "status"), getattr(result, "x")  # noqa: B009
    if status not in (0, 1):
        raise RuntimeError(f"HiGHS found no schedule where there is one: {getattr(result, 'message')}")  # noqa: B009
    best, chosen = known, list(starts)
    if solution is not None:
        picked = np.flatnonzero(np.asarray(solution)[: len(owner)] > 0.5)
        mine = [0] * len(jobs)
        for one in picked:
            mine[owner[one]] = int(begin[one])
        if (reached := value(metric, jobs, mine)) <= best:
            best, chosen = reached, mine
    if status == 0:
        return Solved(best, best, True, tuple(chosen))
    dual = getattr(result, "mip_dual_bound", None)
    return Solved(best, _bound(metric, jobs, dual), False, tuple(chosen))


def _bound(metric: str, jobs: Sequence[Job], dual: float | None) -> float:
    """The solver's bound in the metric's terms; what delays nobody if it has none."""
    if metric == "makespan":
        return float(dual or 0.0)
    alone = float(np.mean([job.output for job in jobs])) if metric == "latency" else 1.0
    return alone + max(0.0, float(dual or 0.0))
