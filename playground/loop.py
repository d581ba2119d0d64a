"""The one loop: it takes arrivals in, launches steps, and commits what comes back.

It never sleeps and reads no clock but the backend's; it knows no policy and no device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, nextafter
from typing import NamedTuple, Protocol, cast

from playground.backend import Backend, Repeating
from playground.core import Abort, Done, Request, Step
from playground.scheduler import SEND, Ended, Event, Group, Scheduler
from playground.workload.source import Source


class Recorder(Protocol):
    """What the loop tells a trace."""

    def arrived(self, request: Request) -> None: ...
    def looked(self, now: float, commits: int) -> None: ...
    def launched(self, step: Step, group: Group) -> None: ...
    def committed(self, done: Done, step: Step) -> None: ...
    def happened(self, event: Event) -> None: ...
    def ended(self, ended: Ended) -> None: ...
    def waits(self) -> None:
        """The backend has all it gets for now: what takes time is hidden behind its work here."""


MOST_NAPS = 10_000
"""Wakes in a row, with nothing in flight and nothing due, after which a policy that places nothing never will."""


YOUNG = 20_000
"""Objects that are made between two searches for garbage among them."""


class Stuck(RuntimeError):
    """Work waits, nothing is in flight, nothing will arrive, and the policy places nothing: not now, or not ever."""


def serve(source: Source, scheduler: Scheduler, backend: Backend, recorder: Recorder) -> None:
    """Serve until the source has nothing due, nothing waits and nothing is in flight."""
    if backend.spec.repeats:
        scheduler.turns = cast(Repeating, backend).turns
    with _little_garbage():
        _serve(source, scheduler, backend, recorder)


@contextmanager
def _little_garbage() -> Iterator[None]:
    """What was there before lasts, and steps make no cycles: looking for some at every turn takes a tenth of a run."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _serve(source: Source, scheduler: Scheduler, backend: Backend, recorder: Recorder) -> None:
    commits = fruitless = naps = 0
    while True:
        now = backend.now()
        planned = _plan(source, scheduler, backend, recorder, now, commits)
        if planned.launched:
            fruitless = naps = 0
            if scheduler.opened:  # keep the pipe full before blocking
                continue
        elif planned.sent:  # to a group that may have been asked before
            fruitless = _count_fruitless(fruitless, scheduler)
            continue
        due = min(source.due(), scheduler.wake)
        if scheduler.in_flight:
            # Who gave something up and placed nothing is asked again now, not when somebody else happens to come back.
            if planned.moved and not planned.launched and fruitless <= _patience(scheduler):
                fruitless += 1
                continue
        else:
            if due == inf and not scheduler.live:
                return
            if planned.moved or due <= now:
                fruitless = _count_fruitless(fruitless, scheduler)
                continue
            naps = _count_naps(naps, source, scheduler)
        fruitless = 0  # time goes on
        recorder.waits()
        if done := _wait(scheduler, backend, due):
            commits += 1
            recorder.committed(done, scheduler.commit(done))
            _tell(source, scheduler, recorder)


def _wait(scheduler: Scheduler, backend: Backend, due: float) -> Done | None:
    """The next completion until `due`; reports are taken on the way, as of just before."""
    while scheduler.in_flight and (report := scheduler.report_due) <= due:
        if done := backend.wait(nextafter(report, -inf)):
            return done
        scheduler.report()
    return backend.wait(due)


class _Planned(NamedTuple):
    """What came of one look: was a step launched, a sequence sent to another rank, anything else decided?"""

    launched: bool
    sent: bool
    moved: bool


def _plan(
    source: Source, scheduler: Scheduler, backend: Backend, recorder: Recorder, now: float, commits: int
) -> _Planned:
    """One look at the clock: what is due comes in, and every group that may launch a step is asked for one."""
    changed = _take_in(source, scheduler, recorder, now)
    asked = scheduler.opened
    changed |= _tell(source, scheduler, recorder)
    if changed or asked:
        recorder.looked(now, commits)
    launched = sent = moved = False
    for group in asked:
        step = scheduler.next_step(group, now)
        sent |= any(event.kind == SEND for event in scheduler.events)
        moved |= _tell(source, scheduler, recorder)
        if step:
            recorder.launched(step, group)
            backend.launch(step)
            launched = True
    return _Planned(launched, sent, moved)


def _take_in(source: Source, scheduler: Scheduler, recorder: Recorder, now: float) -> bool:
    if source.due() > now:
        return False
    for event in source.take(now):
        if isinstance(event, Abort):
            scheduler.abort(event.request, now)
        else:
            recorder.arrived(event.request)
            scheduler.arrive(event.request, now)
    return True


def _tell(source: Source, scheduler: Scheduler, recorder: Recorder) -> bool:
    """Pass on what the scheduler noted; whether there was anything."""
    if not scheduler.events and not scheduler.ended:
        return False
    for event in scheduler.events:
        recorder.happened(event)
    scheduler.events.clear()
    for ended in scheduler.ended:
        recorder.ended(ended)
        source.finished(ended.request.id, ended.finished)
    scheduler.ended.clear()
    return True


def _count_fruitless(count: int, scheduler: Scheduler) -> int:
    """A policy may give up everything that runs before it places something, but not play with it for ever."""
    if count > _patience(scheduler):
        raise _stuck(scheduler)
    return count + 1


def _patience(scheduler: Scheduler) -> int:
    return 2 * len(scheduler.sequences) + 2


def _count_naps(count: int, source: Source, scheduler: Scheduler) -> int:
    """With nothing due but a wake, a policy may hold work back, but not for ever."""
    if source.due() < inf:
        return 0
    if scheduler.wake == inf:
        raise _stuck(scheduler)
    if count > MOST_NAPS:
        raise _stuck(scheduler, f"after {MOST_NAPS:,} wakes in a row")
    return count + 1


def _stuck(scheduler: Scheduler, when: str = "and no wake is set") -> Stuck:
    running = sum(len(rank.running) for rank in scheduler.ranks)
    free = sum(rank.pool.free for rank in scheduler.ranks)
    return Stuck(
        f"{type(scheduler.policy).__name__} placed nothing: {scheduler.waiting} requests wait, {running} run, "
        f"{free} KV blocks are free, nothing is in flight or due, {when}"
    )
