"""A recorded run, played again up to a step, and from there on served otherwise.

Up to the branch everything is as in `playground.check.parity`: recorded instants, recorded durations, and every
decision must come out as it was. What is in flight at the branch ends when it did. Then the simulator has its own
clock, a cost model says how long steps take, and another policy may decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from playground.backend import Backend
from playground.check.parity import Player, Recorded
from playground.check.recording import Decision, Recording
from playground.core import Abort, Arrive, Done, Request, RequestView, Spec, Step
from playground.draft import Draft
from playground.loop import Recorder, serve
from playground.policy import ClusterView, Policy
from playground.scheduler import Ended, Event, Group, Scheduler
from playground.sim.durations import Durations, LaneTimes, StepTimes
from playground.sim.processor import Kernels
from playground.workload.source import Source


@dataclass
class Switch:
    """Two policies, one after the other. The second one knows nothing of what the first one was told."""

    before: Policy
    after: Policy
    over: bool = False
    """Whether the second one decides."""

    @property
    def present(self) -> Policy:
        return self.after if self.over else self.before

    def fill(self, draft: Draft) -> None:
        self.present.fill(draft)

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        return self.present.place(request, view)

    def run_ahead(self, spec: Spec) -> int:
        return self.present.run_ahead(spec)

    def steady(self, draft: Draft) -> int:
        return 0


class Spliced:
    """Recorded durations of the steps before the branch, a model's of those after it."""

    def __init__(self, recording: Recording, at: int, model: Durations) -> None:
        self._recorded = Recorded(recording)
        self._at = at
        self._model = model

    def of(self, step: Step) -> StepTimes:
        # Asked in any case: a model may remember how hot a device is.
        modelled = self._model.of(step)
        if step.id >= self._at:
            return modelled
        recorded = self._recorded.of(step)
        lanes = {lane: _measured(times, modelled.lanes[lane]) for lane, times in recorded.lanes.items()}
        return StepTimes(recorded.host, lanes)


def _measured(recorded: LaneTimes, like: LaneTimes) -> LaneTimes:
    """Seconds, as kernels that nobody can slow down where the simulator thinks in those."""
    kernels = any(isinstance(stage, Kernels) for stage in like.stages)
    return LaneTimes(tuple(Kernels(seconds, 0.0, 0.0) if kernels else seconds for seconds in recorded.stages))


class Branch(Player):
    """A player that lets go at step `at`. `source`: the workload itself, for what comes later."""

    def __init__(
        self, recording: Recording, backend: Backend, source: Source, switch: Switch, at: int, recorder: Recorder
    ) -> None:
        super().__init__(recording, backend)
        self._source = source
        self._switch = switch
        self._at = at
        self._recorder = recorder
        self._scheduler: Scheduler | None = None
        self._then = {(commit.step, commit.lane): commit for commit in recording.commits if commit.step < at}
        self._came: set[int] = set()
        """Requests that the recorded loop took in before the branch."""
        self._late: list[Arrive | Abort] = []
        """What was due by then and had not been taken in."""
        self.instant: float | None = None
        """When the branch was, on the run's clock; None as long as it is recorded."""

    def serve(self, scheduler: Scheduler) -> None:
        """`scheduler`: fresh, of the switch."""
        self._scheduler = scheduler
        if self._at == 0:
            self._let_go(0.0)
        serve(self, scheduler, self, self)

    def _let_go(self, instant: float) -> None:
        self.instant, self._switch.over = instant, True
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.limit = scheduler.spec.stages * self._switch.after.run_ahead(scheduler.spec)

    # --- source

    @property
    def total(self) -> int | None:
        return self._source.total

    def due(self) -> float:
        if self.instant is None:
            return super().due()
        return -inf if self._late else self._source.due()

    def take(self, now: float) -> list[Arrive | Abort]:
        if self.instant is not None:
            events, self._late = [*self._late, *map(self._known, self._source.take(now))], []
            return [event for event in events if not (isinstance(event, Arrive) and event.request.id in self._came)]
        events = super().take(now)
        self._came |= {event.request.id for event in events if isinstance(event, Arrive)}
        if self._source.due() <= now:
            self._late += [self._known(event) for event in self._source.take(now)]
        gone = {event.request for event in events if isinstance(event, Abort)}
        self._late = [event for event in self._late if not self._is_past(event, gone)]
        return events

    def _is_past(self, event: Arrive | Abort, gone: set[int]) -> bool:
        """Whether the recorded loop has taken it in."""
        return event.request.id in self._came if isinstance(event, Arrive) else event.request in gone

    def _known(self, event: Arrive | Abort) -> Arrive | Abort:
        """With as many tokens as the answer had when it was recorded."""
        if isinstance(event, Abort):
            return event
        returned, _, outcome = self._recording.returned.get(event.request.id, (0, None, ""))
        if outcome != "finished" or not returned:
            return event
        return Arrive(replace(event.request, output_length=returned))

    def finished(self, request_id: int, now: float) -> None:
        self._source.finished(request_id, now)

    # --- backend

    def now(self) -> float:
        return super().now() if self.instant is None else self._backend.now()

    def wait(self, until: float = inf) -> Done | None:
        if self.instant is None:
            done = super().wait(until)
        else:
            done = self._early.popleft() if self._early else self._backend.wait(until)
        return done if done is None or done.step >= self._at else self._as_recorded(done)

    def _as_recorded(self, done: Done) -> Done:
        """To the last bit, and with what a replay counts as part of a stage's time taken apart again."""
        commit = self._then[done.step, done.lane]
        stages = tuple(zip(commit.stage_started, commit.stage_finished, strict=True)) if commit.stage_started else ()
        return replace(done, launched=commit.launched, started=commit.started, finished=commit.finished, stages=stages)

    # --- recorder

    def launched(self, step: Step, group: Group) -> None:
        self._recorder.launched(step, group)
        if self.instant is not None:
            return
        super().launched(step, group)
        if step.id + 1 >= self._at:
            self._let_go(step.planned)

    def arrived(self, request: Request) -> None:
        self._recorder.arrived(request)

    def looked(self, now: float, commits: int) -> None:
        self._recorder.looked(now, commits)

    def committed(self, done: Done, step: Step) -> None:
        self._recorder.committed(done, step)

    def happened(self, event: Event) -> None:
        self._recorder.happened(event)

    def ended(self, ended: Ended) -> None:
        self._recorder.ended(ended)
        if self.instant is None:
            super().ended(ended)

    def waits(self) -> None:
        self._recorder.waits()


def lanes_of(recording: Recording) -> set[str]:
    """Lanes with slices that any step has."""
    decisions: dict[int, Decision] = recording.decisions
    return {part.lane for decision in decisions.values() for part in decision.slices}
