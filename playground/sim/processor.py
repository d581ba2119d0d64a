"""A simulated processor: lanes take turns inside, and share the device between them.

Contention law: `n` busy lanes each run at `(1 + gain * (n - 1)) / n` of full speed. Gain 0: they take turns, nothing is
won; gain 1: they do not feel each other. A number between is what a device measures (MuxServe and Nexus fit such
curves); the cost model's compute and memory shares can replace it later.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from simpy.core import Environment
from simpy.events import Event
from simpy.resources.resource import Resource

Steps = Generator[Event, Any, tuple[float, float]]


@dataclass(slots=True, eq=False)
class _Job:
    left: float
    """Seconds of work at full speed."""


class Processor:
    """One device: FIFO within a lane, shared between lanes."""

    def __init__(self, environment: Environment, gain: float) -> None:
        if not 0 <= gain <= 1:
            raise ValueError(f"lane_gain={gain} must lie in [0, 1]")
        self._environment = environment
        self._gain = gain
        self._lanes: dict[str, Resource] = {}
        self._jobs: list[_Job] = []
        self._updated = 0.0
        self._changed = Event(environment)

    def run(self, lane: str, work: float) -> Steps:
        """Wait for the lane's turn, then do `work` seconds; (started, finished)."""
        if lane not in self._lanes:
            self._lanes[lane] = Resource(self._environment)
        with self._lanes[lane].request() as turn:
            yield turn
            started = self._environment.now
            job = _Job(work)
            self._join(job)
            while job in self._jobs:
                timer = self._environment.timeout(job.left / self._speed())
                outcome = yield timer | self._changed if len(self._lanes) > 1 else timer
                self._progress()
                if len(self._lanes) == 1 or timer in outcome:
                    self._leave(job)
            return started, self._environment.now

    def _speed(self) -> float:
        busy = len(self._jobs)
        return (1 + self._gain * (busy - 1)) / busy

    def _join(self, job: _Job) -> None:
        self._progress()
        self._jobs.append(job)
        self._announce()

    def _leave(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._announce()

    def _progress(self) -> None:
        """Take off what every job has done since the last change."""
        now = self._environment.now
        if self._jobs and now > self._updated:
            done = (now - self._updated) * self._speed()
            for job in self._jobs:
                job.left = max(job.left - done, 0.0)
        self._updated = now

    def _announce(self) -> None:
        if len(self._lanes) > 1:
            changed, self._changed = self._changed, Event(self._environment)
            changed.succeed()
