"""How far a run or a sweep is, on stderr: a bar on a terminal, a line now and then elsewhere. Changes nothing of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from analysis.waiting import LINE_EVERY, PATIENCE
from playground.workload.source import Event, Source

BAR_EVERY = 0.1


class Meter(Protocol):
    def update(self, done: int, total: int | None, now: float) -> None:
        """So many requests ended, at this time of the run (seconds)."""
        ...


Shown = Callable[[str], AbstractContextManager[Meter]]
"""Makes the meter of a run from its title."""


class Watched:
    """A source that tells a meter of every request that ended."""

    def __init__(self, source: Source, meter: Meter) -> None:
        self._source = source
        self._meter = meter
        self._ended = 0

    @property
    def total(self) -> int | None:
        return self._source.total

    def due(self) -> float:
        return self._source.due()

    def take(self, now: float) -> list[Event]:
        return self._source.take(now)

    def finished(self, request_id: int, now: float) -> None:
        self._source.finished(request_id, now)
        self._ended += 1
        self._meter.update(self._ended, self.total, now)


@contextmanager
def meter(title: str, unit: str = "requests") -> Iterator[Meter]:
    """A bar where somebody watches, lines where a file does."""
    if not sys.stderr.isatty():
        yield Lines(title, unit)
        return
    with _progress() as progress:
        yield Bar(progress, title, unit)


class Bar:
    def __init__(self, progress: Progress, title: str, unit: str = "requests") -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, visible=False, now=0.0, unit=unit)
        self._began = self._shown = monotonic()

    def update(self, done: int, total: int | None, now: float) -> None:
        clock = monotonic()
        if clock - self._shown < BAR_EVERY:
            return
        self._shown = clock
        visible = clock - self._began > PATIENCE
        self._progress.update(self._task, completed=done, total=total, now=now, visible=visible)


class Lines:
    def __init__(self, title: str, unit: str = "requests") -> None:
        self._title = title
        self._unit = unit
        self._due = monotonic() + PATIENCE

    def update(self, done: int, total: int | None, now: float) -> None:
        if (clock := monotonic()) < self._due:
            return
        self._due = clock + LINE_EVERY
        of = f" of {total:,}" if total is not None else ""
        print(f"{self._title}: {done:,}{of} {self._unit}, {now:.1f} s of the run", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Tally:
    """Where a sweep stands: points that are over, those that failed, the share (0 to 1) that is done of the running."""

    titles: Mapping[int, str]
    over: int = 0
    """Before this process began and since."""
    failed: list[str] = field(default_factory=list)
    """`rate=-1: must be greater than 0`"""
    shares: dict[int, float] = field(default_factory=dict)
    _ended: int = 0
    _began: float = field(default_factory=lambda: monotonic())

    @property
    def total(self) -> int:
        return len(self.titles)

    def start(self, number: int) -> None:
        self.shares[number] = 0.0

    def share(self, number: int, share: float) -> None:
        self.shares[number] = share

    def end(self, number: int, problem: str | None) -> None:
        """`problem`: why it failed; None if it did not."""
        del self.shares[number]
        self.over += 1
        self._ended += 1
        if problem is not None:
            self.failed.append(f"{self.titles[number]}: {problem}")

    def left(self, now: float) -> float | None:
        """Seconds until all are over, at the pace so far; None while there is none."""
        done = self._ended + sum(self.shares.values())
        return (now - self._began) * (self.total - self.over - sum(self.shares.values())) / done if done else None

    def told(self) -> str:
        """`, 2 failed, about 14 s left`"""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        left = self.left(monotonic())
        return failed + (f", about {_duration(left)} left" if left is not None else "")


class SweepMeter(Protocol):
    def show(self, tally: Tally) -> None: ...

    def say(self, line: str) -> None:
        """Print a line without disturbing what is shown."""
        ...


@contextmanager
def sweep_meter() -> Iterator[SweepMeter]:
    """One display for all points of a sweep."""
    if not sys.stderr.isatty():
        yield SweepLines()
        return
    # Refreshed by hand: a thread of its own would be forked along with the processes of the points.
    with Progress(
        *_SWEEP_COLUMNS, console=Console(stderr=True), transient=True, auto_refresh=False, expand=True
    ) as progress:
        yield SweepBar(progress)


class SweepBar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("sweep", total=None, told="", running="")
        self._failed = 0

    def show(self, tally: Tally) -> None:
        for line in tally.failed[self._failed :]:
            self.say(f"failed: {line}")
        self._failed = len(tally.failed)
        running = [f"{tally.titles[number]} {share:.0%}" for number, share in tally.shares.items()]
        done = tally.over + sum(tally.shares.values())
        self._progress.update(
            self._task,
            completed=done,
            total=tally.total,
            told=f"{tally.over}/{tally.total} points{tally.told()}",
            running=", ".join(running),
        )
        self._progress.refresh()

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)


class SweepLines:
    def __init__(self) -> None:
        self._due = monotonic() + PATIENCE
        self._failed = 0

    def show(self, tally: Tally) -> None:
        if (clock := monotonic()) < self._due:
            return
        self._due = clock + LINE_EVERY
        for line in tally.failed[self._failed :]:
            self.say(f"failed: {line}")
        self._failed = len(tally.failed)
        self.say(f"sweep: {tally.over} of {tally.total} points{tally.told()}")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


_SWEEP_COLUMNS = (
    TextColumn("{task.description}", table_column=Column(no_wrap=True)),
    BarColumn(bar_width=20),
    TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True)),
    TextColumn("{task.fields[running]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}, {task.fields[now]:.1f} s of the run"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
