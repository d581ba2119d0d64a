"""The simulated backend: SimPy carries out steps on stages, links and copy engines.

It knows durations, not tensors: a sampled token is the number 0, and a sequence ends when its request's output length
(else `max_tokens`) is reached. Nothing here depends on how fast the host is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, islice
from math import inf
from operator import sub
from typing import Any, NamedTuple, Protocol

from simpy.core import Environment
from simpy.events import Timeout

from playground.core import COPY_IN, COPY_OUT, Columns, Done, Request, Spec, Step
from playground.sim.contention import APART, TURNS, Law
from playground.sim.durations import Durations, LaneTimes, StepTimes
from playground.sim.processor import Finished, Processor

_TOKEN = (0,)


class _Clock(Environment):
    """SimPy's, but that it can be set: `run(until)` ends at now + (until - now), which may be a rounding away."""

    def advance(self, until: float) -> None:
        while self.peek() < until:
            self.step()
        self._now = until


class _Launched(NamedTuple):
    step: Step
    launched: float
    host: float


class _Stretch(NamedTuple):
    done: Done
    step: Step
    ticks: list[float]


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
        self.spec = spec
        self._durations = durations
        self._environment = _Clock()
        machine = build(self._environment, spec) if build else _unshared(self._environment, spec, law)
        self._stages, self._links, self._engines = machine
        self._hosts = [0.0 for _ in spec.groups]
        """Until when the host of each group is busy planning."""
        self._last: list[dict[int, int]] = [{} for _ in spec.groups]
        """Length of each sequence of each group when it samples its last token."""
        self._ready: deque[tuple[Done, Step]] = deque()
        self._held: _Stretch | None = None
        """Repetitions that are done but for the last, which something came in the middle of."""
        self._launched = self._answered = -1
        """The last step that was launched, and the last one that had been when `wait` answered last."""

    def now(self) -> float:
        return float(self._environment.now)

    def launch(self, step: Step) -> None:
        last = self._last[step.group]
        for id in step.ends:
            last.pop(id, None)
        for request in step.starts:
            last[request.id] = request.prompt_length + _output_length(request) - 1
        self._launched = step.id
        times = self._durations.of(step)
        if len(self._hosts) == 1:
            self._advance(self.now() + times.host)
            self._begin(_Launched(step, self.now(), times.host), times)
        else:
            self._plan(step, times)

    def _plan(self, step: Step, times: StepTimes) -> None:
        """Each group has a host of its own, which plans one step after another: those of others need not wait."""
        begins = max(self.now(), self._hosts[step.group]) + times.host
        self._hosts[step.group] = begins
        launched = _Launched(step, begins, times.host)
        if begins <= self.now():
            self._begin(launched, times)
            return
        timer = Timeout(self._environment, begins - self.now())
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._begin(launched._replace(launched=self.now()), times))

    def _begin(self, launched: _Launched, times: StepTimes) -> None:
        for lane in launched.step.lanes:
            _Journey(self, launched, lane, times.lanes[lane]).begin()

    def wait(self, until: float = inf) -> Done | None:
        if self._held:
            return self._go_on(self._held, until)
        environment = self._environment
        while not self._ready:
            following = environment.peek()
            if following > until:
                self._advance(until)
                self._answered = self._launched
                return None
            if following == inf:
                raise RuntimeError("nothing is in flight and no time to wait for")
            environment.step()
        done, step = self._ready.popleft()
        # Whatever was answered since its launch, the caller may have changed its mind.
        quiet = step.id > self._answered
        self._answered = self._launched
        return self._repeat(done, step, until) if quiet and step.repeat > 1 else done

    def close(self) -> None:
        """Nothing to stop."""

    def _advance(self, until: float) -> None:
        """The clock to `until`, with everything that happens before."""
        if until > self._environment.now:
            self._environment.advance(until)

    # --- completions

    def _complete(self, launched: _Launched, lane: str, times: list[tuple[float, float]]) -> None:
        step = launched.step
        slices = step.columns_of(lane)
        done = Done(
            step.id,
            lane,
            launched.launched,
            times[0][0],
            times[-1][1],
            dict.fromkeys(compress(slices.sequence, slices.samples), _TOKEN),
            self._ended(step.group, slices),
            launched.host,
            stages=tuple(times) if len(times) > 1 else (),
        )
        self._ready.append((done, step))

    def _ended(self, group: int, slices: Columns, ticks: int = 0) -> tuple[int, ...]:
        """Which sequences got their last token, so many repetitions later. A slice beyond that came too late."""
        lasts = map(self._last[group].get, slices.sequence)
        parts = zip(slices.sequence, lasts, slices.start, slices.length, slices.samples, strict=True)
        return tuple([id for id, last, start, length, samples in parts if last == start + length + ticks and samples])

    # --- quiet stretches

    def _repeat(self, done: Done, step: Step, until: float) -> Done | None:
        """Go on with the same decodes until a sequence ends, something else happens, or `until` would be passed.

        Only exactly what stepping would do: a repetition that does not end before the next event is left to the
        loop, which may decide otherwise; but one that has begun at `until` nobody can take back if it is `certain`.
        """
        if done.ended or self._ready:
            return done
        slices = step.columns
        lasts = map(self._last[step.group].__getitem__, slices.sequence)
        most = min(step.repeat, min(map(sub, lasts, slices.start)))  # each of them one token long
        following = self._environment.peek()
        finish = done.finished
        ticks = [finish]
        for host, work in islice(self._durations.ticks(step), most - 1):
            finish += host
            finish += work
            if finish >= following or (finish > until and not step.certain):
                break
            ticks.append(finish)
            if finish > until:
                self._held = _Stretch(done, step, ticks)
                return self._go_on(self._held, until)
        return self._merged(done, step, ticks)

    def _go_on(self, stretch: _Stretch, until: float) -> Done | None:
        if stretch.ticks[-1] > until:
            self._advance(until)
            return None
        self._held = None
        return self._merged(*stretch)

    def _merged(self, done: Done, step: Step, ticks: list[float]) -> Done:
        count = len(ticks)
        if count == 1:
            return done
        ended = self._ended(step.group, step.columns, count - 1)
        self._advance(ticks[-1])
        tokens = dict.fromkeys(done.tokens, _TOKEN * count)
        return Done(
            done.step,
            done.lane,
            done.launched,
            done.started,
            ticks[-1],
            tokens,
            ended,
            done.host,
            count,
            tuple(ticks),
        )


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
