"""Schedules without pauses that are good enough to begin with: each request as early as it fits, in some order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import numpy as np

from experiments.regret.problem import Array, Job, Room, computed, held, value

ORDERS: tuple[Callable[[Job], tuple[int, ...]], ...] = (
    lambda job: (job.arrival, job.id),
    lambda job: (job.output, job.arrival, job.id),
    lambda job: (job.output * (2 * job.prompt + job.output), job.arrival, job.id),
    lambda job: (job.arrival + job.output, job.id),
    lambda job: (-job.output, job.arrival, job.id),
)


TRIES = 400


def best(metric: str, jobs: Sequence[Job], room: Room) -> tuple[float, list[int]]:
    """The best of several list schedules, and of what moving single requests in its order makes of it.

    Its value and its starts; always the same, for the moves are drawn from a seed.
    """
    found = [starts for order in ORDERS for starts in _both(sorted(jobs, key=order), jobs, room)]
    reached, starts = min(((value(metric, jobs, one), one) for one in found), key=lambda one: one[0])
    order = [job for _, job in sorted(zip(starts, jobs, strict=True), key=lambda one: (one[0], one[1].id))]
    rng = Random(0)
    for _ in range(TRIES if len(jobs) > 1 else 0):
        moved = list(order)
        moved.insert(rng.randrange(len(jobs)), moved.pop(rng.randrange(len(jobs))))
        tried = _placed(moved, jobs, room)
        if (worth := value(metric, jobs, tried)) <= reached:
            order, starts, reached = moved, tried, worth
    return reached, starts


def _both(order: Sequence[Job], jobs: Sequence[Job], room: Room) -> Iterator[list[int]]:
    """One after another wherever each fits, and round by round with whoever fits then."""
    yield _placed(order, jobs, room)
    yield _by_round(order, jobs, room)


class _Calendar:
    """What is taken, round by round."""

    def __init__(self, jobs: Sequence[Job], room: Room) -> None:
        rounds = max(job.arrival for job in jobs) + sum(job.output for job in jobs) + 1
        self._free = np.zeros((3, rounds), dtype=np.int64)
        self._free += np.array([[room.blocks], [room.seats], [room.tokens]])

    def fits(self, needs: Array, start: int) -> bool:
        return bool((self._free[:, start : start + needs.shape[1]] >= needs).all())

    def take(self, needs: Array, start: int) -> None:
        self._free[:, start : start + needs.shape[1]] -= needs


def needs(job: Job, room: Room) -> Array:
    """Of its blocks, seats and tokens a row each, by round of its service."""
    return np.stack([held(job, room), np.ones(job.output, dtype=np.int64), computed(job)])


def _placed(order: Sequence[Job], jobs: Sequence[Job], room: Room) -> list[int]:
    calendar, starts = _Calendar(jobs, room), {}
    for job in order:
        start, wants = job.arrival, needs(job, room)
        while not calendar.fits(wants, start):
            start += 1
        calendar.take(wants, start)
        starts[job.id] = start
    return [starts[job.id] for job in jobs]


def _by_round(order: Sequence[Job], jobs: Sequence[Job], room: Room) -> list[int]:
    calendar, starts = _Calendar(jobs, room), {}
    left, now = list(order), 0
    while left:
        for job in [job for job in left if job.arrival <= now]:
            if calendar.fits(wants := needs(job, room), now):
                calendar.take(wants, now)
                starts[job.id] = now
                left.remove(job)
        now += 1
    return [starts[job.id] for job in jobs]
