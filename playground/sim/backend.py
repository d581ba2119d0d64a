"""The simulated backend: SimPy carries out steps on stages, links and copy engines.

It knows durations, not tensors: a sampled token is the number 0, and a sequence ends when its request's output length
(else `max_tokens`) is reached. Nothing here depends on how fast the host is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush
from itertools import compress, islice
from math import inf
from operator import sub
from typing import Any, NamedTuple, Protocol, cast

from simpy.core import Environment
from simpy.events import NORMAL, URGENT, Event, EventPriority

from playground.core import COPY_IN, COPY_OUT, Columns, Done, Request, Spec, Step, Turn
from playground.sim.contention import APART, TURNS, Law
from playground.sim.durations import Durations, LaneTimes, Repeating, StepTimes
from playground.sim.processor import Finished, Processor

_TOKEN = (0,)

AHEAD = 32
"""Repetitions that are added up at a time where there are several groups."""


class _Clock(Environment):
    """SimPy's, but that times are set as they are: now + (time - now) may be a rounding away."""

    def advance(self, until: float) -> None:
        """Everything before `until`, and what is to begin then."""
        queue = self._queue
        while queue and queue[0][:2] < (until, NORMAL):
            self.step()
        self._now = until

    def at(self, time: float, do: Callable[[], None], priority: EventPriority = URGENT) -> None:
        event = Event(self)
        event._ok, event._value, event.callbacks = True, None, [lambda _: do()]
        heappush(self._queue, (time, priority, next(self._eid), event))


class _Launched(NamedTuple):
    step: Step
    launched: float
    host: float


@dataclass(slots=True, eq=False)
class _Run:
    """A step that is repeated without anybody being asked."""

    launched: _Launched
    lane: str
    visits: list[tuple[float, float]]
    """(started, finished) on each stage, repetition by repetition; of a lone stage in the first one."""
    most: int
    """Repetitions that there may be."""
    times: Iterator[Any]
    ticks: list[float]
    """When repetitions finish; on a lone stage also those to come, until something may be due."""
    planned: list[float]
    host: float = 0.0
    """Of every repetition."""


class Resource(Protocol):
    """Does work lane by lane: a processor, or something that takes another kind of work than seconds."""

    def submit(self, lane: str, work: Any, finished: Finished) -> None: ...


class Machine(NamedTuple):
    """What steps run on, by group: stages, links from each to the next, and copy engines."""

    stages: Sequence[Sequence[Resource]]
    links: Sequence[Sequence[Resource]]
    engines: Sequence[Resource]
    """Each direction is a lane that does not feel the other."""


class SimBackend:
    """Stages in sequence, lanes on each stage at once, copies beside them, all on SimPy's clock.

    `law`: how lanes share a stage. Steps of one group enter every stage in the order of their launch. `build` makes
    another machine than one whose groups and links share nothing; then `durations` must speak of such work.
    """

    def __init__(
        self,
        spec: Spec,
        durations: Durations,
        law: Law = TURNS,
        build: Callable[[Environment, Spec], Machine] | None = None,
    ) -> None:
        if spec.repeats and not isinstance(durations, Repeating):
            raise ValueError(f"{type(durations).__name__} cannot repeat steps: set Spec.repeats to False")
        self.spec = spec
        self.durations = durations
        """Who is asked how long steps take: one may stand before it, until the first step."""
        self._environment = _Clock()
        machine = build(self._environment, spec) if build else _unshared(self._environment, spec, law)
        self._stages, self._links, self._engines = machine
        self._hosts = [0.0 for _ in spec.groups]
        """Until when the host of each group is busy planning."""
        self._last: list[dict[int, int]] = [{} for _ in spec.groups]
        """Length of each sequence of each group when it samples its last token."""
        self._ready: deque[Done] = deque()
        self.unshared = build is None
        """Whether stages and links are their group's alone: then times are seconds."""
        self._exact = self.unshared and spec.stages == 1
        """Nobody else uses a group's only stage: when repetitions finish can be added up."""
        self._lone = len(spec.groups) == 1
        self._runs: list[dict[int, _Run]] = [{} for _ in spec.groups]
        """By step; who was decided last comes last."""
        self._launched = -1
        self._settled = [-1 for _ in spec.groups]
        """Steps up to this one are not repeated any more."""
        self._until = -inf
        """When the caller may decide otherwise; as long as it waits."""

    def now(self) -> float:
        return float(self._environment.now)

    def launch(self, step: Step) -> None:
        last = self._last[step.group]
        for id in step.ends:
            last.pop(id, None)
        for request in step.starts:
            last[request.id] = request.prompt_length + _output_length(request) - 1
        self._launched = step.id
        times = self.durations.of(step)
        if self._lone:
            self._advance(self.now() + times.host)
            self._begin(_Launched(step, self.now(), times.host), times)
        else:
            begins = self._plan(step.group, self.now(), times.host)
            self._begin_at(_Launched(step, begins, times.host), times)

    def _plan(self, group: int, planned: float, host: float) -> float:
        """Each group has a host of its own, which plans one step after another: those of others need not wait."""
        self._hosts[group] = begins = max(planned, self._hosts[group]) + host
        return begins

    def _begin_at(self, launched: _Launched, times: StepTimes) -> None:
        if launched.launched <= self.now():
            self._begin(launched, times)
        else:
            self._environment.at(launched.launched, lambda: self._begin(launched, times))

    def _begin(self, launched: _Launched, times: StepTimes) -> None:
        for lane in launched.step.lanes:
            _Journey(self, launched, lane, times.lanes[lane]).begin()

    def wait(self, until: float = inf) -> Done | None:
        environment, ready = self._environment, self._ready
        self._until = until
        while not ready:
            following = environment.peek()
            if following > until:
                self._advance(until)
                break
            if following == inf:
                raise RuntimeError("nothing is in flight and no time to wait for")
            environment.step()
        self._until = -inf
        if self._lone and self._runs[0]:
            self._advance(self._planned_until())
        return ready.popleft() if ready else None

    def close(self) -> None:
        """Nothing to stop."""

    def _advance(self, until: float) -> None:
        """The clock to `until`, with everything that happens before."""
        if until > self._environment.now:
            self._environment.advance(until)

    # --- completions

    def _complete(self, launched: _Launched, lane: str, visits: list[tuple[float, float]]) -> None:
        step = launched.step
        if step.repeat > 1 and (step.id > self._settled[step.group] or step.id in self._runs[step.group]):
            self._repeat(launched, lane, visits)
        else:
            self._deliver(launched, lane, visits)

    def _deliver(
        self,
        launched: _Launched,
        lane: str,
        visits: Sequence[tuple[float, float]],
        ticks: Sequence[float] = (),
        planned: Sequence[float] = (),
    ) -> None:
        step, count = launched.step, len(ticks) or 1
        slices = step.columns_of(lane)
        done = Done(
            step.id,
            lane,
            launched.launched,
            visits[0][0],
            ticks[-1] if ticks else visits[-1][1],
            dict.fromkeys(compress(slices.sequence, slices.samples), _TOKEN * count),
            self._ended(step.group, slices, count - 1),
            launched.host,
            count,
            tuple(ticks) if count > 1 else (),
            tuple(visits) if len(visits) > 1 else (),
            tuple(planned) if count > 1 else (),
        )
        self._ready.append(done)

    def _ended(self, group: int, slices: Columns, ticks: int) -> tuple[int, ...]:
        """Which sequences got their last token, so many repetitions later. A slice beyond that came too late."""
        lasts = map(self._last[group].get, slices.sequence)
        parts = zip(slices.sequence, lasts, slices.start, slices.length, slices.samples, strict=True)
        return tuple([id for id, last, start, length, samples in parts if last == start + length + ticks and samples])

    # --- repetitions: what the caller would decide anyway
    #
    # A step goes on until one of its sequences ends, its repetitions are used up, or the caller may think otherwise: a
    # repetition is begun only before `_until`, and of a group that was not stopped. All times are those of stepping.

    def turns(self, group: int, stop: bool) -> list[Turn]:
        """How far the group's repeated steps are, in the order in which their last repetitions were decided.

        `stop`: whatever runs is carried to the end of its repetition, and comes back then.
        """
        runs = self._runs[group]
        if stop:
            self._settled[group] = self._launched
        if not self._exact:
            return [Turn(step, len(run.planned), len(run.ticks)) for step, run in runs.items()]
        turns = []
        for step, run in runs.items():
            done = bisect_left(run.ticks, self.now())
            if stop and done + 1 < len(run.ticks):
                del run.ticks[done + 1 :]
                self._reach(run)
            turns.append(Turn(step, done + 1, done))
        return turns

    def _repeat(self, launched: _Launched, lane: str, visits: list[tuple[float, float]]) -> None:
        step, finish = launched.step, visits[-1][1]
        runs = self._runs[step.group]
        run = runs.pop(step.id, None)
        if run is None:
            lasts = map(self._last[step.group].__getitem__, step.columns.sequence)
            most = min(step.repeat, min(map(sub, lasts, step.columns.start)))  # each of them one token long
            durations = cast(Repeating, self.durations)
            times: Iterator[Any] = durations.ticks(step) if self._exact else durations.repetitions(step)
            run = _Run(launched, lane, [], most, times, [], [step.planned])
        run.ticks.append(finish)
        run.visits += visits
        planned = max(finish, self._hosts[step.group]) if self._lone else finish
        if not self._goes_on(run, planned):
            self._deliver(run.launched, lane, run.visits, run.ticks, run.planned)
            return
        runs[step.id] = run
        if self._exact:
            self._add_up(run)
        else:
            self._go_on(run, planned)

    def _goes_on(self, run: _Run, planned: float) -> bool:
        """Whether another repetition is begun, decided at `planned`."""
        step = run.launched.step
        quiet = planned < self._until and not self._ready and step.id > self._settled[step.group]
        return quiet and len(run.ticks) < run.most

    def _go_on(self, run: _Run, planned: float) -> None:
        """Once more through the stages."""
        run.planned.append(planned)
        times = next(run.times)
        begins = self._plan(run.launched.step.group, planned, times.host)
        self._begin_at(run.launched._replace(launched=begins), times)

    def _add_up(self, run: _Run) -> None:
        """On to the last repetition, but no further than is likely to last.

        A lone group is stopped by nearly all that is due; of many, most are not: they look ahead, and what somebody is
        stopped before is taken back.
        """
        ticks, finish = run.ticks, run.ticks[-1]
        # Of what happens at the same time in other groups the order does not matter; in its own it does.
        following, until = (self._environment.peek(), self._until) if self._lone else (inf, inf)
        left = run.most - len(ticks)
        for host, work in islice(run.times, left if self._lone else min(left, AHEAD)):
            finish += host
            finish += work
            if finish >= following:
                run.most = len(ticks)
                break
            run.host = host
            ticks.append(finish)
            if finish >= until:
                break
        self._reach(run)

    def _reach(self, run: _Run) -> None:
        """Be there when the last of the repetitions added up ends, unless their number changes before."""
        count = len(run.ticks)

        def reached() -> None:
            runs, step = self._runs[run.launched.step.group], run.launched.step
            if runs.get(step.id) is not run or len(run.ticks) != count:
                return
            if self._goes_on(run, run.ticks[-1]):
                self._add_up(run)
            else:
                del runs[step.id]
                self._deliver(run.launched, run.lane, run.visits, run.ticks)  # all of it follows from the ticks

        self._environment.at(run.ticks[-1], reached, NORMAL)

    def _planned_until(self) -> float:
        """When the lone host is done with what it decided last."""
        if not self._exact:
            return self._hosts[0]
        (run,) = self._runs[0].values()
        done = bisect_left(run.ticks, self.now())
        return run.ticks[done - 1] + run.host if done else -inf


class _Journey:
    """One lane of a step on its way through the stages, or through a copy engine."""

    __slots__ = ("_backend", "_lane", "_launched", "_times", "_visits")

    def __init__(self, backend: SimBackend, launched: _Launched, lane: str, times: LaneTimes) -> None:
        self._backend = backend
        self._launched = launched
        self._lane = lane
        self._times = times
        self._visits: list[tuple[float, float]] = []

    def begin(self) -> None:
        self._enter(0.0, 0.0)

    def _enter(self, _sent: float, _arrived: float) -> None:
        backend, group = self._backend, self._launched.step.group
        if self._lane in (COPY_IN, COPY_OUT):
            processor: Resource = backend._engines[group]
        else:
            processor = backend._stages[group][len(self._visits)]
        processor.submit(self._lane, self._times.stages[len(self._visits)], self._leave)

    def _leave(self, started: float, finished: float) -> None:
        self._visits.append((started, finished))
        if len(self._visits) == len(self._times.stages):
            self._backend._complete(self._launched, self._lane, self._visits)
        else:
            link = self._backend._links[self._launched.step.group][len(self._visits) - 1]
            link.submit(self._lane, self._times.transfer, self._enter)


def _unshared(environment: Environment, spec: Spec, law: Law) -> Machine:
    def processors(count: int, law: Law = TURNS) -> list[Processor]:
        return [Processor(environment, law) for _ in range(count)]

    return Machine(
        [processors(spec.stages, law) for _ in spec.groups],
        [processors(spec.stages - 1) for _ in spec.groups],
        processors(len(spec.groups), APART),
    )


def _output_length(request: Request) -> int:
    return request.max_tokens if request.output_length is None else request.output_length
