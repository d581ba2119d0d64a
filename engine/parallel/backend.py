"""The backend of many ranks: it sends every step to the workers of its group, and puts together what they report.

Scheduler and loop run in this process, the driver's; nothing is computed here. A group is a replica: a pipeline of
stages, each of a team of tensor-parallel ranks. What the last stage sampled goes to the others with later steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf, nextafter
from threading import TIMEOUT_MAX, Condition
from time import perf_counter
from typing import Any

from engine.errors import EngineError, StepFailed
from engine.parallel.config import WorkerConfig
from engine.parallel.layout import Place
from engine.parallel.supervise import Crew, Hire, Loss, Peer
from engine.parallel.wire import DIALECT, Kind, Token, decode_report, encode_step, kind, plain, value
from playground.core import COPY_IN, COPY_OUT, Done, Spec, Step

SILENCE = 5.0
"""Seconds that a rank with steps in flight may leave a ping unanswered."""


@dataclass(slots=True)
class Flight:
    """A lane of a step that workers have been given, and what each stage has said of it."""

    step: Step
    lane: str
    launched: float
    reports: dict[int, Done] = field(default_factory=dict)

    def done(self, stages: int) -> Done:
        """Of all stages; tokens are the last one's."""
        parts = [self.reports[stage] for stage in range(stages)]
        spans = self._spans(parts)
        return replace(
            parts[-1],
            launched=self.launched,
            started=spans[0][0],
            finished=max(finished for _, finished in spans),
            host=parts[0].host,
            stages=spans if stages > 1 else (),
        )

    def _spans(self, parts: Sequence[Done]) -> tuple[tuple[float, float], ...]:
        """When each stage was at work, on the driver's clock; what lags a little keeps cause before effect."""
        if self.lane in (COPY_IN, COPY_OUT):  # stages copy beside one another
            starts = [max(part.started, self.launched) for part in parts]
            return tuple((start, max(start, part.finished)) for start, part in zip(starts, parts, strict=True))
        spans, ready = [], self.launched
        # A stage had done its part when a later one had; waiting for the one before is no work.
        ends = list(accumulate((part.finished for part in reversed(parts)), min))[::-1]
        for part, end in zip(parts, ends, strict=True):
            finished = max(end, ready)
            spans.append((min(max(part.started, ready), finished), finished))
            ready = finished
        return tuple(spans)


class ParallelBackend:
    """Workers as `hire` brings them, one for each rank of the configuration's layout.

    The clock starts at the first `now()` or `launch`, when all have warmed up. A rank that fails, dies, or does not
    get on ends all the others within seconds, and makes `wait` raise `StepFailed` with its name and its last step.
    """

    def __init__(self, config: WorkerConfig, hire: Hire) -> None:
        """Returns when all have loaded; what they were given and cannot use is an `EngineError`."""
        self._config = config
        self._layout = config.layout
        self._changed = Condition()
        # All below are guarded by `_changed`.
        self._words: dict[Kind, dict[int, Any]] = {Kind.READY: {}, Kind.STARTED: {}}
        self._flights: dict[int, dict[tuple[int, str], Flight]] = {group: {} for group in range(self._layout.replicas)}
        self._known: dict[int, list[Token]] = {group: [] for group in range(self._layout.replicas)}
        self._ready: list[tuple[float, int, Done]] = []
        self._landed = count()
        self._floor = 0.0
        """What is not ready yet counts as finished after this: it was looked for until then."""
        self._heard = perf_counter()
        self._latest: dict[int, int] = {}
        """The step that each rank's stage has finished last."""
        self._failure: Exception | None = None
        self._origin: float | None = None
        self._crew = Crew(hire, self)
        try:
            self._crew.start()
            self.spec = self._common_spec(self._words_of_all(Kind.READY).values())
        except BaseException:
            self._crew.stop()
            raise

    def start(self) -> None:
        """Have all ranks warm up and set the clock to 0. Not while steps are in flight."""
        for rank in range(self._layout.ranks):
            self._crew.send(rank, plain(Kind.START))
        self._words_of_all(Kind.STARTED)
        self._origin = perf_counter()

    def now(self) -> float:
        """Seconds since the run began; the first call begins it."""
        if self._origin is None:
            self.start()
        return self._clock()

    def launch(self, step: Step) -> None:
        """Send a step to its group's workers."""
        launched = self.now()
        with self._changed:
            if self._failure is not None:
                return  # what was lost with the failure, this one would build upon
            for lane in step.lanes:
                self._flights[step.group][step.id, lane] = Flight(step, lane, launched)
            known, self._known[step.group] = self._known[step.group], []
        message = encode_step(step, known)
        for rank in self._group(step.group):
            self._crew.send(rank, message)

    def wait(self, until: float = inf) -> Done | None:
        """The next completion in order of finish; None once `until` has passed without one.

        When a rank is lost this raises `StepFailed`, once what had come back before is out, and ever after.
        """
        self.now()
        with self._changed:
            if not self._ready and not any(self._flights.values()) and self._failure is None and until == inf:
                raise RuntimeError("wait: nothing is in flight and no time was given to wait for")
            self._sleep(until)
            if self._ready and self._ready[0][0] <= until:
                self._floor, _, done = heappop(self._ready)
                return done
            if self._failure is not None:
                raise self._failure
            self._floor = max(self._floor, until)
            return None

    def close(self) -> None:
        """End all workers; steps in flight are dropped."""
        self._crew.stop()

    def _clock(self) -> float:
        assert self._origin is not None
        return perf_counter() - self._origin

    def _sleep(self, until: float) -> None:
        while not self._ready and self._failure is None:
            left = until - self._clock()
            if left <= 0:
                return
            self._changed.wait(min(left, TIMEOUT_MAX))

    def _group(self, group: int) -> range:
        """A replica's ranks."""
        size = self._layout.stages * self._layout.tp
        return range(group * size, (group + 1) * size)

    # --- starting

    def _words_of_all(self, word: Kind) -> dict[int, Any]:
        """What every rank has said of that kind, in order of ranks."""
        said = self._words[word]
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(said) == self._layout.ranks)
            if self._failure is not None:
                raise self._failure
            return dict(sorted(said.items()))

    def _common_spec(self, specs: Iterable[dict[str, Any]]) -> Spec:
        """What holds for every rank: a block is the same one on all of them."""
        each = [Spec(**spec) for spec in specs]
        return replace(
            each[0],
            blocks=min(spec.blocks for spec in each),
            stages=self._layout.stages,
            ranks=self._layout.replicas,
            forwards_tokens=self._layout.stages == 1 and each[0].forwards_tokens,
        )

    # --- in the crew's thread

    def heard(self, peer: Peer, message: bytes) -> None:
        """A worker's word."""
        word = kind(message)
        if word is Kind.REPORT:
            self._report(peer, decode_report(message))
        elif word is Kind.HELLO:
            self._greet(peer, value(message))
        else:
            with self._changed:
                self._words[word][peer.rank] = value(message) if word is Kind.READY else None
                self._changed.notify_all()

    def _greet(self, peer: Peer, told: dict[str, Any]) -> None:
        if told["dialect"] != DIALECT:
            raise EngineError(
                f"parallel: {self._layout.named(peer.rank)} speaks version {told['dialect']}, the driver {DIALECT}; "
                "install one version on all hosts"
            )
        self._crew.send(peer.rank, plain(Kind.CONFIG, self._config.told()))

    def _report(self, peer: Peer, report: Done) -> None:
        place = self._layout.place(peer.rank)
        with self._changed:
            assert self._origin is not None
            shift = peer.offset + self._origin
            flights = self._flights[place.replica]
            flight = flights[report.step, report.lane]
            flight.reports[place.stage] = replace(
                report, started=report.started - shift, finished=report.finished - shift
            )
            self._latest[self._spokesman(peer.rank)] = report.step
            self._heard = perf_counter()
            if len(flight.reports) == self._layout.stages:
                del flights[report.step, report.lane]
                self._land(flight, place.replica)

    def _land(self, flight: Flight, group: int) -> None:
        done = flight.done(self._layout.stages)
        if self._layout.stages > 1:
            self._known[group] += _tokens(flight.step, done)
        if done.finished <= self._floor:  # word of it was on its way when somebody looked
            done.finished = nextafter(self._floor, inf)
            done.stages = (*done.stages[:-1], *[(started, done.finished) for started, _ in done.stages[-1:]])
        heappush(self._ready, (done.finished, next(self._landed), done))
        self._changed.notify_all()

    def patience(self, rank: int) -> float | None:
        """For how long a rank may be silent: while it loads, as long as ranks wait for one another."""
        with self._changed:
            if self._origin is None:
                return self._config.patience
            return SILENCE if self._flights[self._layout.place(rank).replica] else None

    def stalled(self) -> Loss | None:
        """The first stage that holds its group up, where nobody reports anything although steps are in flight."""
        with self._changed:
            flights = [next(iter(group.values())) for group in self._flights.values() if group]
            if not flights:
                return None
            oldest = min(flights, key=lambda flight: flight.launched)
            assert self._origin is not None
            since = perf_counter() - max(self._heard, self._origin + oldest.launched)
            if since <= self._config.patience:
                return None
            stage = next(stage for stage in range(self._layout.stages) if stage not in oldest.reports)
            rank = self._layout.rank(Place(oldest.step.group, stage, 0))
            return Loss(rank, f"has not finished a step for {since:.0f} seconds")

    def lost(self, loss: Loss | Exception) -> None:
        """The end of it all."""
        with self._changed:
            self._failure = self._explained(loss) if isinstance(loss, Loss) else loss
            self._changed.notify_all()

    def _explained(self, loss: Loss) -> Exception:
        name = self._layout.named(loss.rank)
        if loss.usage:
            return EngineError(f"{loss.why} ({name})")
        if self._origin is None:
            return EngineError(f"parallel: {name} {loss.why}{'' if loss.died else ','} while it was starting")
        why = f"{name} {loss.why}" if loss.died else f"{name}: {loss.why}"
        return StepFailed(f"{why}; {self._whereabouts(loss)}")

    def _whereabouts(self, loss: Loss) -> str:
        """The last steps that a rank is known to have been in."""
        place = self._layout.place(loss.rank)
        spokesman = self._spokesman(loss.rank)
        finished = max(loss.finished, self._latest.get(spokesman, -1))
        waiting = [
            flight.step.id for flight in self._flights[place.replica].values() if place.stage not in flight.reports
        ]
        last = f"the last step it finished was {finished}" if finished >= 0 else "it had finished no step"
        return f"it was in step {waiting[0]}, {last}" if waiting else f"it had no step to do, {last}"

    def _spokesman(self, rank: int) -> int:
        """Who reports for a team."""
        return self._layout.rank(self._layout.place(rank)._replace(tp_rank=0))


def _tokens(step: Step, done: Done) -> list[Token]:
    """What a step sampled, with positions; of sequences that go on, for the others need no more tokens."""
    ends = {part.sequence: part.start + part.length for part in step.slices if part.samples and part.lane == done.lane}
    return [
        Token(id, ends[id] + place, token)
        for id, tokens in done.tokens.items()
        if id not in done.ended
        for place, token in enumerate(tokens)
    ]
