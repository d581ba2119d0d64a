"""What a policy's decisions cost: microseconds of `fill` with so many sequences, and how that grows.

The clock is the caller's: nothing of the core reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from statistics import median

from playground.check.case import Make
from playground.core import Done, Request, RequestView, Spec, Step
from playground.draft import Draft
from playground.policy import ClusterView, Policy
from playground.scheduler import Scheduler

SIZES = (16, 256, 1024)
WAITING = 4
"""Requests that wait, for each that may run."""
STEPS = 24
GROWTH = 1.5
"""Exponent of the cost above which a policy will not do for many sequences: twice as many take 2.8 times as long."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Median microseconds of a `fill`, by seats; four times as many requests wait, where the policy lets all in."""

    micros: dict[int, float]

    @property
    def growth(self) -> float:
        """Exponent between the two largest sizes: 1 is proportional."""
        (small, less), (large, more) = sorted(self.micros.items())[-2:]
        return log(max(more, 1e-3) / max(less, 1e-3)) / log(large / small)

    @property
    def problem(self) -> str:
        """Why it grows too fast, or nothing."""
        if self.growth <= GROWTH:
            return ""
        told = ", ".join(f"{micros:.0f} us with {size}" for size, micros in self.micros.items())
        return f"{told}: it grows with exponent {self.growth:.1f}, {GROWTH} is allowed"


class Timed:
    """A policy whose `fill` is timed."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self.seconds: list[float] = []

    def fill(self, draft: Draft) -> None:
        begun = self._clock()
        self._policy.fill(draft)
        self.seconds.append(self._clock() - begun)

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        return self._policy.place(request, view)

    def run_ahead(self, spec: Spec) -> int:
        return self._policy.run_ahead(spec)

    def steady(self, draft: Draft) -> int:
        return 0


def cost(make: Make, clock: Callable[[], float], sizes: tuple[int, ...] = SIZES) -> Cost:
    """Time `fill` in a queue where as many decode as have seats. `clock` counts seconds."""
    return Cost({size: _micros(make, clock, size) for size in sizes})


def _micros(make: Make, clock: Callable[[], float], seats: int) -> float:
    spec = Spec(blocks=seats * 64, max_seqs=seats, max_tokens=max(8192, seats))
    timed = Timed(make(), clock)
    scheduler = Scheduler(spec, timed)
    for id in range(seats * (1 + WAITING)):
        scheduler.arrive(Request(id, 0.001 * id, 16, 400, 400), 0.001 * id)
    now = 0.001 * seats * (1 + WAITING)
    now = _turns(scheduler, now, STEPS + seats // 16)  # until all that can run do
    timed.seconds.clear()
    _turns(scheduler, now, STEPS)
    return median(timed.seconds) * 1e6


def _turns(scheduler: Scheduler, now: float, count: int) -> float:
    """So many steps, each all the way; what time it is then."""
    for _ in range(count):
        now += 0.01
        for group in scheduler.groups:
            while len(group.flights) < scheduler.limit and scheduler.next_step(group, now):
                pass
            for flight in list(group.flights.values()):
                _back(scheduler, flight.step, now)
    return now


def _back(scheduler: Scheduler, step: Step, now: float) -> None:
    for lane in step.lanes:
        columns = step.columns_of(lane)
        sampled = [id for id, samples in zip(columns.sequence, columns.samples, strict=True) if samples]
        scheduler.commit(Done(step.id, lane, now, now, now, dict.fromkeys(sampled, (0,))))
