"""Tasks in processes of their own, so many at a time. Knows processes, not what a task does.

A process serves one task where it can be forked, with all imports done: its memory is given back, and nothing that one
task leaves behind reaches another. Where it must be spawned (macOS), which takes seconds, it serves several.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIG_BLOCK, SIG_IGN, SIG_SETMASK, SIG_UNBLOCK, SIGINT, SIGTERM, Signals, pthread_sigmask, signal
from threading import Thread
from time import monotonic
from typing import Any, NoReturn, cast

from experiments.memory import Room

GRACE = 5.0
"""Seconds that a task which is told to end has for closing what it holds."""
TICK = 0.2
CGROUP = Path("/sys/fs/cgroup/cpu.max")


class Terminated(KeyboardInterrupt):
    """By SIGTERM: what a scheduler ends is closed like what a person ends."""


@dataclass(frozen=True, slots=True)
class Started:
    number: int


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a task said of itself."""

    number: int
    word: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """`died`: how its process went down under the task; None: the task returned."""

    number: int
    died: str | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened for a while."""


@dataclass(frozen=True, slots=True)
class Short:
    """Memory holds so many at a time, one of which takes `need` bytes: the next waits. Told once for each number."""

    running: int
    need: int


Event = Started | Told | Ended | Tick | Short


@dataclass(frozen=True, slots=True)
class Line:
    """A task's line to the process that started it."""

    connection: Connection

    def tell(self, word: Any) -> None:
        self.connection.send((_TOLD, word))

    def alone(self) -> None:
        """Returns once no other task runs, and keeps it so until this one ends: for what measures time."""
        self.connection.send((_ALONE, None))
        self.connection.recv()


Task = Callable[[int, Line], None]
_TOLD, _ALONE, _DONE = "told", "alone", "done"


@dataclass(slots=True)
class Worker:
    process: BaseProcess
    connection: Connection
    number: int
    held: bool = False
    """Waits until it may run alone."""


class Pool:
    """So many processes at a time, fewer where memory lacks `room`; how they are made depends on the platform."""

    def __init__(self, task: Task, workers: int, method: str, room: Room | None = None) -> None:
        self._task = task
        self._most = workers
        self._room = room
        self._short: set[int] = set()
        """With how many running it was told that memory holds no more."""
        self._context = get_context(method)
        self._reuses = method != "fork"
        self._busy: list[Worker] = []
        self._leaving: list[Worker] = []
        """Have no task any more; waiting for them would keep the next task waiting."""
        self._alone: Worker | None = None

    def run(self, numbers: Iterable[int]) -> Generator[Event, None, None]:
        """What happens, as it happens. Closing the generator ends what still runs, and waits for it."""
        left = deque(numbers)
        try:
            while left or self._busy:
                while left and self._may_start():
                    if not self._fits():
                        yield from self._tell_short()
                        break
                    yield self._start(left.popleft())
                self._let_one_alone()
                yield from self._listen(left)
                self._leaving = [worker for worker in self._leaving if not _has_left(worker)]
            for worker in self._leaving:
                worker.process.join(GRACE)  # what hangs while it exits is killed below
        finally:
            _end([*self._busy, *self._leaving])

    def _may_start(self) -> bool:
        return len(self._busy) < self._most and not any(worker.held for worker in self._busy) and self._alone is None

    def _fits(self) -> bool:
        """One always does: it may be all that memory is for."""
        return self._room is None or not self._busy or self._room.fits([w.process.pid or 0 for w in self._busy])

    def _tell_short(self) -> Iterator[Short]:
        if self._room and len(self._busy) not in self._short:
            self._short.add(len(self._busy))
            yield Short(len(self._busy), self._room.need)

    def _start(self, number: int) -> Started:
        ours, theirs = self._context.Pipe()
        # Signals wait meanwhile: a process that has been started is in the list of those to end.
        with _undisturbed():
            process = cast(Any, self._context).Process(target=_serve, args=(self._task, theirs, number))
            process.start()
            self._busy.append(Worker(process, ours, number))
        theirs.close()
        return Started(number)

    def _let_one_alone(self) -> None:
        held = [worker for worker in self._busy if worker.held]
        if held and self._alone is None and len(held) == len(self._busy):
            self._alone = held[0]
            self._alone.held = False
            _send(self._alone, None)

    def _listen(self, left: deque[int]) -> Iterator[Event]:
        ready = wait([worker.connection for worker in self._busy], TICK)
        if not ready:
            yield Tick()
        for worker in [worker for worker in self._busy if worker.connection in ready]:
            try:
                kind, word = worker.connection.recv()
            except (EOFError, OSError):
                yield self._bury(worker)
                continue
            if kind == _TOLD:
                yield Told(worker.number, word)
            elif kind == _ALONE:
                worker.held = True
            else:
                yield from self._finish(worker, left)

    def _finish(self, worker: Worker, left: deque[int]) -> Iterator[Event]:
        ended = Ended(worker.number)
        if self._room:
            self._room.learn(worker.process.pid or 0)
        self._release(worker)
        # Put somewhere before anything is told: who listens may stop.
        if self._reuses and left and self._may_start():
            worker.number = left.popleft()
            self._busy.append(worker)
            _send(worker, worker.number)
            yield from (ended, Started(worker.number))
        else:
            self._leaving.append(worker)
            _send(worker, None)
            yield ended

    def _bury(self, worker: Worker) -> Ended:
        self._release(worker)
        worker.process.join(GRACE)
        _kill(worker)
        return Ended(worker.number, _cause(worker.process.exitcode))

    def _release(self, worker: Worker) -> None:
        self._busy.remove(worker)
        if self._alone is worker:
            self._alone = None


def cores() -> int:
    """That this process may use: of its affinity, or as a container's quota has it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))


def method() -> str:
    """Fork where it is safe: not on macOS, whose libraries start threads, and not once CUDA is in use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "fork" if sys.platform == "linux" and not (cuda and cuda.is_initialized()) else "spawn"


def _serve(task: Task, connection: Connection, number: int) -> None:
    """What a process does: tasks, until there is no more or the parent is gone."""
    signal(SIGINT, SIG_IGN)  # a terminal sends it to all of us; the parent decides
    signal(SIGTERM, _terminate)
    Thread(target=_follow_parent, daemon=True).start()
    pthread_sigmask(SIG_UNBLOCK, {SIGINT, SIGTERM})
    following: int | None = number
    try:
        while following is not None:
            task(following, Line(connection))
            connection.send((_DONE, None))
            following = connection.recv()
    except (Terminated, EOFError, BrokenPipeError):
        sys.exit(128 + SIGTERM)


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _follow_parent() -> None:
    """A parent that is killed cannot end its children: they see that it is gone."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(128 + SIGTERM)


def _send(worker: Worker, word: int | None) -> None:
    with suppress(OSError):  # it died: its line will say so
        worker.connection.send(word)


def _has_left(worker: Worker) -> bool:
    worker.process.join(0)
    return worker.process.exitcode is not None


def _kill(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _end(workers: list[Worker]) -> None:
    deadline = monotonic() + GRACE
    try:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(max(0.0, deadline - monotonic()))
    finally:  # also where a person is impatient
        for worker in workers:
            _kill(worker)


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code}"
    name = Signals(-code).name
    hint = " (for lack of memory? fewer at a time: hydra.launcher.workers=1)" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{hint}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = pthread_sigmask(SIG_BLOCK, {SIGINT, SIGTERM})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)
