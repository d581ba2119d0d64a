"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere. Changes nothing of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event as Signal
from threading import Thread
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from playground.workload.source import Event, Source

PATIENCE = 2.0
"""Seconds after which people want to know; anything shorter stays silent."""
LINE_EVERY = 10.0
BAR_EVERY = 0.1


class Meter(Protocol):
    def update(self, done: int, total: int | None, now: float) -> None:
        """So many requests ended, at this time of the run (seconds)."""
        ...


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
def meter(title: str) -> Iterator[Meter]:
    """A bar where somebody watches, lines where a file does."""
    if not sys.stderr.isatty():
        yield Lines(title)
        return
    with _progress() as progress:
        yield Bar(progress, title)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """How long something has taken that cannot tell how far it is."""
    over = Signal()
    teller = Thread(target=_tell_time, args=(title, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell_time(title: str, over: Signal) -> None:
    began, pause = monotonic(), PATIENCE
    while not over.wait(pause):
        print(f"{title}, {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        pause = LINE_EVERY


class Bar:
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, visible=False, now=0.0)
        self._began = self._shown = monotonic()

    def update(self, done: int, total: int | None, now: float) -> None:
        clock = monotonic()
        if clock - self._shown < BAR_EVERY:
            return
        self._shown = clock
        visible = clock - self._began > PATIENCE
        self._progress.update(self._task, completed=done, total=total, now=now, visible=visible)


class Lines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._due = monotonic() + PATIENCE

    def update(self, done: int, total: int | None, now: float) -> None:
        if (clock := monotonic()) < self._due:
            return
        self._due = clock + LINE_EVERY
        of = f" of {total:,}" if total is not None else ""
        print(f"{self._title}: {done:,}{of} requests, {now:.1f} s of the run", file=sys.stderr, flush=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[now]:.1f} s of the run"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
