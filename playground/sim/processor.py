"""A simulated processor: work in one lane is done in order, lanes share the device between them.

Contention law: `n` busy lanes each run at `(1 + gain * (n - 1)) / n` of full speed. Gain 0: they take turns, nothing is
won; gain 1: they do not feel each other. Devices lie between (MuxServe and Nexus measure such curves).

A link or a copy engine is a processor with one lane. It costs one SimPy event a job, whatever waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from simpy.core import Environment
from simpy.events import Event, Timeout

Finished = Callable[[float, float], None]
"""Called with (started, finished) at the moment a job is finished."""


@dataclass(slots=True, eq=False)
class _Job:
    lane: str
    left: float
    """Seconds of work at full speed."""
    finished: Finished
    started: float = 0.0


class Processor:
    """One device, link or copy engine."""

    def __init__(self, environment: Environment, gain: float = 0.0) -> None:
        if not 0 <= gain <= 1:
            raise ValueError(f"lane_gain={gain} must lie in [0, 1]")
        self._environment = environment
        self._gain = gain
        self._lanes: dict[str, deque[_Job]] = {}
        self._busy: list[_Job] = []
        self._updated = 0.0
        self._timer: Timeout | None = None
        self._next: _Job | None = None

    def submit(self, lane: str, work: float, finished: Finished) -> None:
        """Do `work` seconds after everything that was submitted to this lane before."""
        queue = self._lanes.setdefault(lane, deque())
        job = _Job(lane, work, finished)
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
        if not self._busy:
            return
        self._next = self._busy[0] if len(self._busy) == 1 else min(self._busy, key=_left)
        self._timer = Timeout(self._environment, self._next.left / self._speed())
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

    def _speed(self) -> float:
        busy = len(self._busy)
        return (1 + self._gain * (busy - 1)) / busy

    def _progress(self) -> None:
        """Take off what every job has done since the last change."""
        now = self._environment.now
        if self._busy and now > self._updated:
            done = (now - self._updated) * self._speed()
            for job in self._busy:
                job.left = max(job.left - done, 0.0)
        self._updated = now


def _left(job: _Job) -> float:
    return job.left
