"""A simulated processor: work in one lane is done in order, lanes share the device between them by a law.

A copy engine, or a link that nobody else uses, is a processor with one lane. It costs one SimPy event a job, whatever
waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from simpy.core import Environment
from simpy.events import Event, Timeout

from playground.sim.contention import TURNS, Demand, Law

Finished = Callable[[float, float], None]
"""Called with (started, finished) at the moment a job is finished."""


class Kernels(NamedTuple):
    """Seconds on a device that one has to oneself, and how many of them its arithmetic and its bandwidth are used up
    (no more than all)."""

    seconds: float
    compute: float
    memory: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of arithmetic and of bandwidth."""
        if self.seconds <= 0:
            return 1.0, 1.0
        return min(self.compute / self.seconds, 1.0), min(self.memory / self.seconds, 1.0)


@dataclass(slots=True, eq=False)
class _Job:
    lane: str
    compute: float
    memory: float
    left: float
    """Seconds of work at full speed."""
    finished: Finished
    started: float = 0.0
    speed: float = 1.0


class Processor:
    """One device, link or copy engine."""

    def __init__(self, environment: Environment, law: Law = TURNS) -> None:
        self._environment = environment
        self._law = law
        self._lanes: dict[str, deque[_Job]] = {}
        self._busy: list[_Job] = []
        self._updated = 0.0
        self._timer: Timeout | None = None
        self._next: _Job | None = None

    def submit(self, lane: str, work: float | Kernels, finished: Finished) -> None:
        """Do `work` (bare seconds ask for all of the device) after everything submitted to this lane before."""
        if isinstance(work, Kernels):
            job = _Job(lane, *work.shares, work.seconds, finished)
        else:
            job = _Job(lane, 1.0, 1.0, work, finished)
        queue = self._lanes.setdefault(lane, deque())
        queue.append(job)
        if len(queue) == 1:
            self._progress()
            self._start(job)
            self._arm()

    def _start(self, job: _Job) -> None:
        job.started = self._environment.now
        self._busy.append(job)

    def _arm(self) -> None:
        """Wait for the job that ends first; a timer that was set before something changed is let pass."""
        busy = self._busy
        if not busy:
            return
        if len(busy) == 1:
            self._next = busy[0]
            busy[0].speed = 1.0
        else:
            demands = [Demand(job.lane, job.compute, job.memory) for job in busy]
            for job, speed in zip(busy, self._law.speeds(demands), strict=True):
                job.speed = speed
            self._next = min(busy, key=_left)
        self._timer = Timeout(self._environment, _left(self._next))
        assert self._timer.callbacks is not None
        self._timer.callbacks.append(self._fire)

    def _fire(self, timer: Event) -> None:
        job = self._next
        if timer is not self._timer or job is None:
            return
        self._progress()
        self._busy.remove(job)
        queue = self._lanes[job.lane]
        queue.popleft()
        if queue:
            self._start(queue[0])
        self._arm()
        job.finished(job.started, self._environment.now)

    def _progress(self) -> None:
        """Take off what every job has done since the last change."""
        now = self._environment.now
        if self._busy and now > self._updated:
            passed = now - self._updated
            for job in self._busy:
                job.left = max(job.left - passed * job.speed, 0.0)
        self._updated = now


def _left(job: _Job) -> float:
    """Seconds until it ends if nothing changes."""
    return job.left / job.speed
