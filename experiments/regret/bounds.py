"""What no policy can do better than, whether it pauses, preempts or cuts prompts: bounds from relaxations.

Each token is sampled in a round of its own, in which its sequence holds a seat, the KV of all tokens before and a token
of the step: this much of each resource a request takes, whoever schedules it. Let one resource be a machine of speed 1
that may go over from one request to another at any time. Then shortest remaining first has had the most
requests done at every moment (Schrage 1968), so that its k-th completion bounds the k-th of any schedule. So does the
k-th smallest of arrivals plus outputs. The bound takes, for each k, the best of these, rounded up to whole rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from experiments.regret.problem import Array, Job, Room, computed, held

EPSILON = 1e-9


def shortest_remaining(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """Completion times, ascending, of jobs on one machine that always works on whose remainder is least."""
    order = sorted(range(len(work)), key=lambda number: arrivals[number])
    waiting: list[tuple[float, int]] = []
    done: list[float] = []
    now, following = 0.0, 0
    while waiting or following < len(order):
        if not waiting:
            now = max(now, arrivals[order[following]])
        while following < len(order) and arrivals[order[following]] <= now:
            heappush(waiting, (work[order[following]], order[following]))
            following += 1
        left, number = heappop(waiting)
        until = arrivals[order[following]] if following < len(order) else inf
        if now + left <= until:
            now += left
            done.append(now)
        else:
            heappush(waiting, (left - (until - now), number))
            now = until
    return done


def ends(jobs: Sequence[Job], room: Room) -> Array:
    """The k-th end, at the earliest, of any schedule; in rounds since 0, ascending."""
    return _latest(jobs, room, [job.output for job in jobs], firsts=False)


def first_tokens(jobs: Sequence[Job], room: Room) -> Array:
    """The k-th first token, at the earliest."""
    return _latest(jobs, room, [1] * len(jobs), firsts=True)


def least(metric: str, jobs: Sequence[Job], room: Room) -> float:
    """The metric of any policy's schedule is at least this, in rounds."""
    arrivals = [job.arrival for job in jobs]
    if metric == "ttft":
        return float(first_tokens(jobs, room).mean() - np.mean(arrivals))
    if metric == "latency":
        return float(ends(jobs, room).mean() - np.mean(arrivals))
    return float(_last(jobs, room) - min(arrivals))


def _latest(jobs: Sequence[Job], room: Room, alone: Sequence[int], firsts: bool) -> Array:
    arrivals = [float(job.arrival) for job in jobs]
    found = np.sort(np.array([job.arrival + rounds for job, rounds in zip(jobs, alone, strict=True)], dtype=float))
    for work in _work(jobs, room, firsts):
        whole = [ceil(end - EPSILON) for end in shortest_remaining(arrivals, work)]
        found = np.maximum(found, whole)
    return found


def _work(jobs: Sequence[Job], room: Room, firsts: bool) -> list[list[float]]:
    """Rounds of each resource, all of it, that a request takes: until its end, or its first token."""
    until = 1 if firsts else None
    return [
        [float(held(job, room)[:until].sum() / room.blocks) for job in jobs],
        [float((1 if firsts else job.output) / room.seats) for job in jobs],
        [float(computed(job)[:until].sum() / room.tokens) for job in jobs],
    ]


def _last(jobs: Sequence[Job], room: Room) -> float:
    """The last end: whoever comes at some moment or later is served after it."""
    found = max(job.arrival + job.output for job in jobs)
    for work in _work(jobs, room, firsts=False):
        for since in {job.arrival for job in jobs}:
            later = sum(rounds for job, rounds in zip(jobs, work, strict=True) if job.arrival >= since)
            found = max(found, since + ceil(later - EPSILON))
    return float(found)
