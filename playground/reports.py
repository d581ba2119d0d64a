"""What a router is told of the ranks, and when: reports are taken now and then, and arrive later.

It holds copies of loads; it decides nothing and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from playground.policy import Load
from playground.rank import Rank


class Report(NamedTuple):
    """Loads of some ranks, as they were at `taken` and are known from `arrives` on."""

    arrives: float
    taken: float
    loads: tuple[Load, ...]


class Reports:
    """All ranks report together at multiples of `interval` seconds, or each after every `steps` steps of its own.

    A report arrives `delay` seconds after it was taken. Before the first one the ranks count as idle. Whoever changes a
    rank says so before (`passing`), for what a report tells is what was true when it was due.
    """

    def __init__(self, ranks: Sequence[Rank], interval: float = 0.0, steps: int = 0, delay: float = 0.0) -> None:
        self._ranks = ranks
        self._interval = interval
        self._steps = steps
        self._delay = delay
        self._seen = {rank.index: Report(0.0, 0.0, (rank.load(),)) for rank in ranks}
        self._coming: deque[Report] = deque()
        self._count = dict.fromkeys(range(len(ranks)), 0)
        self._next = 1
        """Number of the next report at an interval; number 0 is the idle one."""

    @property
    def due(self) -> float:
        """When the next report at an interval is taken; `inf` where they are not."""
        return self._next * self._interval if self._interval else inf

    def steps_left(self, rank: int) -> int | None:
        """After how many more steps a rank reports; None where that does not count."""
        return self._steps - self._count[rank] % self._steps if self._steps else None

    def passing(self, now: float) -> None:
        """Take what was due until `now`: nothing has changed since the last call."""
        if not self._interval or now < self._next * self._interval:
            return
        last = max(int(now / self._interval), self._next)  # a quotient may be a rounding too small
        # Of those that would have arrived by now, only the newest is of use.
        first = max(self._next, int((now - self._delay) / self._interval))
        loads = tuple(rank.load() for rank in self._ranks)
        for number in range(first, last + 1):
            taken = number * self._interval
            self._coming.append(Report(taken + self._delay, taken, loads))
        self._next = last + 1

    def stepped(self, ranks: Sequence[Rank], now: float, count: int = 1) -> None:
        """So many steps of these ranks were committed, of which only the last may be one to report after."""
        if not self._steps:
            return
        for rank in ranks:
            self._count[rank.index] += count
            if self._count[rank.index] % self._steps == 0:
                self._coming.append(Report(now + self._delay, now, (rank.load(),)))

    def seen(self, now: float) -> tuple[float, list[Load]]:
        """When the oldest of the reports that arrived last was taken, and the loads of all ranks."""
        while self._coming and self._coming[0].arrives <= now:
            report = self._coming.popleft()
            for load in report.loads:
                self._seen[load.rank] = report._replace(loads=(load,))
        reports = self._seen.values()
        return min(report.taken for report in reports), [report.loads[0] for report in reports]


def check_reports(interval: float, steps: int, delay: float) -> None:
    """Refuse reports that nobody takes; one line that says what to set."""
    if not interval >= 0:
        raise ValueError(f"report_interval={interval} must be 0 (always fresh) or more seconds")
    if steps < 0:
        raise ValueError(f"report_steps={steps} must be 0 (not by steps) or more")
    if interval and steps:
        raise ValueError(f"report_interval={interval} and report_steps={steps}: give one of the two")
    if not delay >= 0:
        raise ValueError(f"report_delay={delay} must be 0 or more seconds")
    if delay and not interval and not steps:
        raise ValueError(f"report_delay={delay}: say when reports are taken, too: report_interval or report_steps")
