"""The simulated backend: SimPy carries out steps on stages, links and copy engines.

It knows durations, not tensors: a sampled token is the number 0, and a sequence ends when its request's output length
(else `max_tokens`) is reached. Nothing here depends on how fast the host is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol

from simpy.core import Environment
from simpy.events import Event, Process
from simpy.resources.resource import Resource

from playground.core import COPY_IN, COPY_OUT, Done, Request, Slice, Spec, Step
from playground.sim.cost import CostModel, Shape
from playground.sim.processor import Processor

_TOKEN = (0,)


class Durations(Protocol):
    """How long the parts of a step take, in seconds."""

    def host(self, step: Step) -> float:
        """Planning and input preparation, before the launch; the devices work on meanwhile."""
        ...

    def stage(self, step: Step, lane: str, stage: int) -> float: ...
    def transfer(self, step: Step, lane: str) -> float: ...
    def copy(self, step: Step, lane: str) -> float: ...

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        """(host, stage) of the step's second, third, ... repetition."""
        ...


class Modelled:
    """Durations that a cost model predicts. A lockstep group takes as long as its slowest rank."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def host(self, step: Step) -> float:
        return self._cost.host(Shape.of(step.slices))

    def stage(self, step: Step, lane: str, stage: int) -> float:
        return max((self._cost.stage(shape, stage).device_time for shape in self._shapes(step, lane)), default=0.0)

    def transfer(self, step: Step, lane: str) -> float:
        return max((self._cost.transfer(shape) for shape in self._shapes(step, lane)), default=0.0)

    def copy(self, step: Step, lane: str) -> float:
        return self._cost.copy(sum(len(copy.source) for copy in step.copies if copy.lane == lane))

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        cost, shape = self._cost, Shape.of(step.slices)
        while True:
            shape = shape.tick()
            yield cost.host(shape), cost.stage(shape, 0).device_time

    @staticmethod
    def _shapes(step: Step, lane: str) -> list[Shape]:
        by_rank: dict[int, list[Slice]] = {}
        for part in step.slices:
            if part.lane == lane:
                by_rank.setdefault(part.rank, []).append(part)
        return [Shape.of(slices) for slices in by_rank.values()]


class _Launched(NamedTuple):
    step: Step
    launched: float
    host: float


class SimBackend:
    """Stages in sequence, lanes on each stage at once, copies beside them, all on SimPy's clock.

    `lane_gain`: see `processor`. Steps of one group enter every stage in the order of their launch.
    """

    def __init__(self, spec: Spec, durations: Durations, lane_gain: float = 0.0) -> None:
        self.spec = spec
        self._durations = durations
        self._environment = Environment()
        groups = range(len(spec.groups))
        self._stages = [[Processor(self._environment, lane_gain) for _ in range(spec.stages)] for _ in groups]
        self._links = [[Resource(self._environment) for _ in range(spec.stages - 1)] for _ in groups]
        self._engines = [{lane: Resource(self._environment) for lane in (COPY_IN, COPY_OUT)} for _ in groups]
        self._left: dict[int, int] = {}  # tokens that each sequence still gets
        self._ready: deque[tuple[Done, Step]] = deque()
        self._outstanding = 0

    def now(self) -> float:
        return float(self._environment.now)

    def launch(self, step: Step) -> None:
        for id in step.ends:
            self._left.pop(id, None)
        for request in step.starts:
            self._left[request.id] = _output_length(request)
        host = self._durations.host(step)
        self._advance(self.now() + host)
        launched = _Launched(step, self.now(), host)
        for lane in step.lanes:
            self._outstanding += 1
            work = self._copy if lane in (COPY_IN, COPY_OUT) else self._compute
            Process(self._environment, work(launched, lane))

    def wait(self, until: float = inf) -> Done | None:
        environment = self._environment
        while not self._ready:
            following = environment.peek()
            if following > until:
                self._advance(until)
                return None
            if following == inf:
                raise RuntimeError("nothing is in flight and no time to wait for")
            environment.step()
        done, step = self._ready.popleft()
        self._outstanding -= 1
        return self._repeat(done, step, until) if step.repeat > 1 else done

    def close(self) -> None:
        """Nothing to stop."""

    def _advance(self, until: float) -> None:
        """The clock to `until`, with everything that happens before."""
        if until > self._environment.now:
            self._environment.run(until=until)

    # --- one lane of a step

    def _compute(self, launched: _Launched, lane: str) -> Generator[Event, Any, None]:
        step = launched.step
        stages = self._stages[step.group]
        times: list[tuple[float, float]] = []
        for index, stage in enumerate(stages):
            if index:
                with self._links[step.group][index - 1].request() as link:
                    yield link
                    yield self._environment.timeout(self._durations.transfer(step, lane))
            times.append((yield from stage.run(lane, self._durations.stage(step, lane, index))))
        self._complete(launched, lane, times)

    def _copy(self, launched: _Launched, lane: str) -> Generator[Event, Any, None]:
        step = launched.step
        with self._engines[step.group][lane].request() as engine:
            yield engine
            started = self.now()
            yield self._environment.timeout(self._durations.copy(step, lane))
        self._complete(launched, lane, [(started, self.now())])

    def _complete(self, launched: _Launched, lane: str, times: list[tuple[float, float]]) -> None:
        step = launched.step
        several_lanes = len(step.lanes) > 1
        ids = [part.sequence for part in step.slices if part.samples and not (several_lanes and part.lane != lane)]
        done = Done(
            step.id,
            lane,
            launched.launched,
            times[0][0],
            self.now(),
            dict.fromkeys(ids, _TOKEN),
            self._count_off(ids, 1),
            launched.host,
            stages=tuple(times) if len(times) > 1 else (),
        )
        self._ready.append((done, step))

    def _count_off(self, ids: list[int], tokens: int) -> tuple[int, ...]:
        """Which of these sequences have got their last token now."""
        left = self._left
        ended = []
        for id in ids:
            if id in left:  # else it ended before: the token comes too late
                left[id] -= tokens
                if left[id] == 0:
                    ended.append(id)
                    del left[id]
        return tuple(ended)

    # --- quiet stretches

    def _repeat(self, done: Done, step: Step, until: float) -> Done:
        """Go on with the same decodes until a sequence ends, something else happens, or `until` would be passed.

        Only exactly what stepping would do: a repetition that does not end before the next event is left to the
        loop, which may decide otherwise.
        """
        if done.ended or self._ready:
            return done
        ids = list(done.tokens)
        most = min(step.repeat, 1 + min(self._left[id] for id in ids))
        following = self._environment.peek()
        ticks = [done.finished]
        ticking = self._durations.ticks(step)
        while len(ticks) < most:
            host, work = next(ticking)
            finish = ticks[-1] + host + work
            if finish > until or finish >= following:
                break
            ticks.append(finish)
        count = len(ticks)
        if count == 1:
            return done
        ended = self._count_off(ids, count - 1)
        self._advance(ticks[-1])
        tokens = dict.fromkeys(ids, _TOKEN * count)
        return replace(done, finished=ticks[-1], count=count, ticks=tuple(ticks), tokens=tokens, ended=ended)


def _output_length(request: Request) -> int:
    return request.max_tokens if request.output_length is None else request.output_length
