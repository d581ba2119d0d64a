"""Decision parity: a recorded run is played again through the simulator, and every decision must come out the same.

The recording supplies what a scheduler cannot decide: arrivals, the instants at which it looked at the clock, which
completions it knew by then, and how long each stage took. SimPy carries the steps out again with these durations, the
policy decides again, and the first thing that differs is told, side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nextafter
from statistics import median

from playground.backend import Backend
from playground.check.recording import Commit, Decision, Recording
from playground.core import COPY_IN, COPY_OUT, Abort, Arrive, Done, Request, Spec, Step
from playground.loop import Stuck, serve
from playground.scheduler import Ended, Event, Group, Scheduler
from playground.sim.backend import SimBackend
from playground.sim.contention import APART
from playground.sim.durations import Durations, LaneTimes, StepTimes

LATER = nextafter(inf, 0)
TOLERANCE = 1e-6
"""Seconds by which a replayed completion may miss the recorded one: rounding, no more."""
LAG_SHARE = 0.5
"""If even the promptest tenth of completions were heard of later than half their duration after they are said to have
happened, the durations were wrong. (The median will not do: a busy machine wakes the loop late.)"""

Simulate = Callable[[Spec, Durations], Backend]


def simulate(spec: Spec, durations: Durations) -> Backend:
    """The simulator that replays: recorded durations contain whatever lanes took from each other."""
    return SimBackend(spec, durations, law=APART)


class Divergence(Exception):
    """The first thing that came out differently. `str()` shows both sides."""

    def __init__(self, what: str, recorded: object, replayed: object) -> None:
        super().__init__(f"{what}\n  recorded: {_show(recorded)}\n  replayed: {_show(replayed)}")
        self.what = what


def _show(side: object) -> str:
    if not isinstance(side, Decision):
        return str(side)
    rows = [
        f"    sequence {part.sequence:>6}  epoch {part.epoch}  rank {part.rank}  start {part.start:>6}  "
        f"length {part.length:>5}  {'samples' if part.samples else '':7}  lane {part.lane}  blocks {list(part.blocks)}"
        for part in side.slices
    ]
    head = f"planned {side.planned:.6f}, group {side.group}, {len(rows)} slices, {side.copied_blocks} blocks copied"
    return "\n".join([head, *rows])


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared, all of it equal. `lag`: median seconds from a completion to the look that knew of it."""

    steps: int
    slices: int
    commits: int
    looks: int
    requests: int
    lag: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.slices} slices, {self.commits} completions, {self.looks} instants and "
            f"{self.requests} requests: every decision identical (completions were seen {self.lag * 1e3:.2f} ms late)"
        )


def replay(recording: Recording, scheduler: Scheduler, simulated: Simulate = simulate) -> Report:
    """Play a recording with a fresh scheduler of the same policy and seed. Raises `Divergence`."""
    _check_counts(recording)
    lag = _check_times(recording)
    player = Player(recording, simulated(recording.spec, Recorded(recording)))
    try:
        serve(player, scheduler, player, player)
    except (Stuck, ValueError) as error:  # the scheduler refuses what a faulty backend tells it
        raise Divergence("the replay came to a halt", "the run went on", error) from error
    except _Over:
        pass
    player.check_complete()
    slices = sum(len(decision.slices) for decision in recording.decisions.values())
    commits, looks = len(recording.commits), len(recording.looks)
    return Report(len(recording.decisions), slices, commits, looks, len(recording.returned), lag)


# --- what must hold in a recording by itself


def _check_counts(recording: Recording) -> None:
    """Every finished request got as many tokens as its workload said."""
    for request, (returned, known, outcome) in recording.returned.items():
        if outcome == "finished" and known is not None and returned != known:
            raise Divergence(f"request {request} ended with another number of tokens", returned, known)


def _check_times(recording: Recording) -> float:
    """Completions lie after their launch, in order on each device, and shortly before the look that knew of them."""
    last: dict[tuple[int, str], Commit] = {}
    lags: list[float] = []
    durations: list[float] = []
    for commit, look in zip(recording.commits, _known_at(recording), strict=True):
        if not commit.launched <= commit.started <= commit.finished:
            raise Divergence(f"step {commit.step}: times out of order", commit, "launched <= started <= finished")
        device = recording.decisions[commit.step].group, commit.lane
        if device in last and commit.started < last[device].stage_finished[0] - TOLERANCE:
            raise Divergence(f"step {commit.step} overlaps the one before it on its device", commit, last[device])
        last[device] = commit
        if look is None:
            continue
        instant = recording.looks[look][0]
        if commit.finished > instant + TOLERANCE:
            what = f"step {commit.step} was known before it was finished"
            raise Divergence(what, f"known at {instant:.6f}", f"finished at {commit.finished:.6f}")
        if look not in recording.arrivals:  # else the loop may have had no reason to look before
            lags.append(instant - commit.finished)
            durations.append(commit.finished - commit.started)
    return _check_lag(lags, durations)


def _check_lag(lags: list[float], durations: list[float]) -> float:
    shares = sorted(lag / duration for lag, duration in zip(lags, durations, strict=True) if duration > 0)
    if shares and (prompt := shares[len(shares) // 10]) > LAG_SHARE:
        what = "completions were heard of long after they are said to have happened: durations are too short"
        raise Divergence(what, f"at best {prompt:.0%} of a step later", f"up to {LAG_SHARE:.0%}")
    return median(lags or [0.0])


def _known_at(recording: Recording) -> Iterator[int | None]:
    """For every commit the first look that knew of it; None for those after the last look."""
    look, looks = 0, recording.looks
    for index in range(len(recording.commits)):
        while look < len(looks) and looks[look][1] <= index:
            look += 1
        yield look if look < len(looks) else None


# --- recorded durations


class Recorded:
    """Durations of a recording.

    A stage's time runs from when it could have begun (the step had reached it, and the one before had left it) to when
    it was done: whatever the real device waited for in between belongs to it.
    """

    def __init__(self, recording: Recording) -> None:
        self._lanes: dict[int, dict[str, LaneTimes]] = {}
        self._hosts: dict[int, float] = {}
        free: dict[tuple[int, str, int], float] = {}
        launched: dict[int, float] = {}
        for commit in sorted(recording.commits, key=lambda commit: (commit.step, commit.finished)):
            decision = recording.decisions[commit.step]
            if commit.step not in self._hosts:  # one look may launch several steps of a group, one after another
                before = max(decision.planned, launched.get(decision.group, 0.0))
                self._hosts[commit.step] = max(commit.launched - before, 0.0)
                launched[decision.group] = commit.launched
            self._lanes.setdefault(commit.step, {})[commit.lane] = _lane_times(commit, decision.group, free)

    def of(self, step: Step) -> StepTimes:
        return StepTimes(self._hosts[step.id], self._lanes[step.id])


def _lane_times(commit: Commit, group: int, free: dict[tuple[int, str, int], float]) -> LaneTimes:
    times, reached = [], commit.launched
    # Stages copy beside one another, and the simulator has one engine for all: what counts is when the last is done.
    copies = commit.lane in (COPY_IN, COPY_OUT)
    for stage, finished in enumerate((commit.finished,) if copies else commit.stage_finished):
        device = (group, commit.lane, stage)
        times.append(finished - max(reached, free.get(device, 0.0)))
        free[device] = reached = finished
    return LaneTimes(tuple(times))


# --- playing


class _Over(Exception):
    """A run that was killed ends here."""


class Player:
    """Source, clock, backend and recorder of a replay, all driven by one place in the recording."""

    def __init__(self, recording: Recording, backend: Backend) -> None:
        self.spec = recording.spec
        self._recording = recording
        self._backend = backend
        self._early: deque[Done] = deque()
        """Completions up to the last instant that the recorded loop had not heard of yet."""
        self._look = 0
        self._commits = 0
        self._steps = 0
        self._here: list[Arrive | Abort] | None = None
        """What comes in at the present look; None between looks."""

    # --- source

    @property
    def total(self) -> int | None:
        return len(self._recording.returned)

    def due(self) -> float:
        if self._here:
            return -inf
        return LATER if any(look >= self._look for look in self._recording.arrivals) else inf

    def take(self, now: float) -> list[Arrive | Abort]:
        events, self._here = self._here or [], None
        return events

    def finished(self, request_id: int, now: float) -> None:
        """What a closed loop answered is in the recording."""

    # --- backend

    def now(self) -> float:
        looks = self._recording.looks
        self._here = None
        if self._look == len(looks) or looks[self._look][1] != self._commits:
            return self._backend.now()  # nobody decides anything here: the recorded loop did not look, either
        instant = looks[self._look][0]
        self._here = self._recording.arrivals.get(self._look)
        self._look += 1
        while done := self._backend.wait(instant):
            self._early.append(done)
        return instant

    def launch(self, step: Step) -> None:
        self._backend.launch(step)

    def wait(self, until: float = inf) -> Done | None:
        if self._commits == len(self._recording.commits):
            self._check_over()
            return None
        if self._look < len(self._recording.looks) and self._recording.looks[self._look][1] == self._commits:
            return None
        expected = self._recording.commits[self._commits]
        done = self._next(expected)
        if (done.step, done.lane) != (expected.step, expected.lane):
            raise Divergence("completions in another order", expected, done)
        if abs(done.finished - expected.finished) > TOLERANCE:
            raise Divergence(f"step {done.step} finished at another time", expected.finished, done.finished)
        self._commits += 1
        return done

    def _next(self, expected: Commit) -> Done:
        if self._early:
            return self._early.popleft()
        try:
            done = self._backend.wait(inf)
        except RuntimeError as error:
            raise Divergence("nothing is in flight", expected, error) from error
        assert done is not None
        return done

    def _check_over(self) -> None:
        if self._look < len(self._recording.looks):
            return
        if not self._recording.whole:
            raise _Over
        raise Divergence("the replay goes on", "the run was over", "a completion is waited for")

    def close(self) -> None:
        self._backend.close()

    # --- recorder

    def arrived(self, request: Request) -> None: ...
    def looked(self, now: float, commits: int) -> None: ...
    def waits(self) -> None: ...
    def committed(self, done: Done, step: Step) -> None: ...
    def happened(self, event: Event) -> None: ...

    def launched(self, step: Step, group: Group) -> None:
        recorded = self._recording.decisions.get(step.id)
        copied = sum(len(copy.source) for copy in step.copies)
        replayed = Decision(step.planned, step.group, step.slices, copied)
        if recorded is None and not self._recording.whole:
            raise _Over
        if recorded != replayed:
            raise Divergence(f"step {step.id} is another", recorded or "no such step", replayed)
        self._steps += 1

    def ended(self, ended: Ended) -> None:
        returned, _, outcome = self._recording.returned.get(ended.request.id, (None, None, None))
        if (returned, outcome) != (ended.sequence.returned, ended.outcome) and (outcome or self._recording.whole):
            replayed = f"{ended.outcome}, {ended.sequence.returned} tokens"
            raise Divergence(f"request {ended.request.id} ended differently", f"{outcome}, {returned} tokens", replayed)

    def check_complete(self) -> None:
        """Everything recorded was played."""
        for name, recorded, played in (
            ("steps", len(self._recording.decisions), self._steps),
            ("completions", len(self._recording.commits), self._commits),
        ):
            if recorded != played:
                raise Divergence(f"the replay ended early: {name}", recorded, played)
