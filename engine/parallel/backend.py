"""The backend of many ranks: it sends every step to the workers of its group, and puts together what they report.

Scheduler and loop run in this process, the driver's; nothing is computed here. A group is a replica: a pipeline of
stages, each of a team of tensor-parallel ranks. What the last stage sampled goes to the others with later steps, too:
not all need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from math import inf
from threading import TIMEOUT_MAX, Condition
from time import perf_counter
from typing import Any

from engine.errors import EngineError, StepFailed
from engine.parallel.config import WorkerConfig
from engine.parallel.layout import Place
from engine.parallel.lockstep import pooled, share
from engine.parallel.supervise import Crew, Hire, Loss, Peer
from engine.parallel.wire import DIALECT, Kind, Token, decode_report, encode_step, kind, plain, value
from playground.core import COPY_IN, COPY_OUT, MAIN, Done, Spec, Step

SILENCE = 5.0
"""Seconds that a rank with steps in flight may leave a ping unanswered."""


LATE = 1e-9
"""Seconds between completions that are heard of too late: more than rounding in a replay, which could exchange them."""

PADDED = {"cpu": 1, "cuda": 8}
"""Of how many rows of one token ranks compute a multiple beside prompts: `engine.cuda.forward.ROWS` on a GPU."""


@dataclass(slots=True)
class Flight:
    """A lane of a step that workers have been given, and what each stage has said of it."""

    step: Step
    lane: str
    launched: float
    replicas: Sequence[int]
    """That take part."""
    reports: dict[tuple[int, int], Done] = field(default_factory=dict)
    """By replica and stage."""

    def missing(self, stages: int) -> tuple[int, int] | None:
        """The first replica and stage of which there is no report."""
        every = ((replica, stage) for stage in range(stages) for replica in self.replicas)
        return next((one for one in every if one not in self.reports), None)

    def done(self, free: list[float]) -> Done:
        """Of all stages; tokens are the last one's. `free`: when each had done what came before, and now this."""
        parts = [_together([self.reports[one, stage] for one in self.replicas]) for stage in range(len(free))]
        spans = self._copied(parts, free) if self.lane in (COPY_IN, COPY_OUT) else self._computed(parts, free)
        return replace(
            parts[-1],
            launched=self.launched,
            started=spans[0][0],
            finished=max(finished for _, finished in spans),
            host=parts[0].host,
            stages=tuple(spans) if len(spans) > 1 else (),
        )

    def _copied(self, parts: Sequence[Done], free: list[float]) -> list[tuple[float, float]]:
        """Stages copy beside one another; one counts as done when those before it are, too: so replays have it."""
        spans, ready = [], self.launched
        for stage, part in enumerate(parts):
            # One replica may have been ahead of another.
            ready = max(part.finished, ready, free[stage])
            spans.append((min(max(part.started, self.launched, free[stage]), ready), ready))
            free[stage] = ready
        return spans

    def _computed(self, parts: Sequence[Done], free: list[float]) -> list[tuple[float, float]]:
        """When each stage was at work, on the driver's clock; what lags a little keeps cause before effect."""
        spans, ready = [], self.launched
        # A stage had done its part when a later one had; waiting for the one before is no work, nor is being ahead of
        # another replica.
        ends = list(accumulate((part.finished for part in reversed(parts)), min))[::-1]
        for stage, (part, end) in enumerate(zip(parts, ends, strict=True)):
            finished = max(end, ready, free[stage])
            spans.append((min(max(part.started, ready, free[stage]), finished), finished))
            ready = free[stage] = finished
        return spans


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
        everybody = range(self._layout.replicas)
        self._groups = [list(everybody)] if self._layout.lockstep else [[replica] for replica in everybody]
        """Replicas that step together."""
        self._flights: list[dict[tuple[int, str], Flight]] = [{} for _ in self._groups]
        self._known: list[list[Token]] = [[] for _ in everybody]
        self._free: list[dict[str, list[float]]] = [{} for _ in self._groups]
        """When each group's stages had done what has come back, by what goes on side by side: copies, and the rest."""
        self._ready: list[tuple[float, int, Done]] = []
        self._landed = count()
        self._floor = 0.0
        """What is not ready yet counts as finished after this: it was looked for until then, or others were late."""
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
        replicas = self._groups[step.group]
        with self._changed:
            if self._failure is not None:
                return  # what was lost with the failure, this one would build upon
            for lane in step.lanes:
                self._flights[step.group][step.id, lane] = Flight(step, lane, launched, replicas)
            known = {replica: self._known[replica] for replica in replicas}
            self._known = [[] if replica in known else told for replica, told in enumerate(self._known)]
        if not self._layout.lockstep:
            self._send(step.group, encode_step(step, known[step.group]))
            return
        crowd = pooled(step, len(replicas), self._config.overlap, PADDED[self._config.device])
        for replica in replicas:
            self._send(replica, encode_step(share(step, replica), known[replica], crowd))

    def wait(self, until: float = inf) -> Done | None:
        """The next completion in order of finish; None once `until` has passed without one.

        When a rank is lost this raises `StepFailed`, once what had come back before is out, and ever after.
        """
        self.now()
        with self._changed:
            if not self._ready and not any(self._flights) and self._failure is None and until == inf:
                raise RuntimeError("wait: nothing is in flight and no time was given to wait for")
            self._sleep(until)
            if self._ready and self._ready[0][0] <= until:
                finished, _, done = heappop(self._ready)
                self._floor = max(self._floor, finished)
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

    def _send(self, replica: int, message: bytes) -> None:
        """To all of a replica's ranks."""
        size = self._layout.stages * self._layout.tp
        for rank in range(replica * size, (replica + 1) * size):
            self._crew.send(rank, message)

    def _group(self, replica: int) -> int:
        """To which of the groups that step together a replica belongs."""
        return 0 if self._layout.lockstep else replica

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
            lockstep=self._layout.lockstep,
            forwards_tokens=all(spec.forwards_tokens for spec in each),
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
            flights = self._flights[self._group(place.replica)]
            flight = flights[report.step, report.lane]
            flight.reports[place.replica, place.stage] = replace(
                report, started=report.started - shift, finished=report.finished - shift
            )
            self._latest[self._spokesman(peer.rank)] = report.step
            self._heard = perf_counter()
            if flight.missing(self._layout.stages) is None:
                del flights[report.step, report.lane]
                self._land(flight)

    def _land(self, flight: Flight) -> None:
        beside = flight.lane if flight.lane in (COPY_IN, COPY_OUT) else MAIN
        free = self._free[flight.step.group].setdefault(beside, [0.0] * self._layout.stages)
        done = flight.done(free)
        if self._layout.stages > 1:
            for replica, token in _tokens(flight.step, done):
                self._known[replica].append(token)
        if done.finished <= self._floor:  # word of it was on its way when somebody looked
            done.finished = self._floor = self._floor + LATE
            done.stages = (*done.stages[:-1], *[(started, done.finished) for started, _ in done.stages[-1:]])
            free[-1] = done.finished
        heappush(self._ready, (done.finished, next(self._landed), done))
        self._changed.notify_all()

    def patience(self, rank: int) -> float | None:
        """For how long a rank may be silent: while it loads, as long as ranks wait for one another."""
        with self._changed:
            if self._origin is None:
                return self._config.patience
            return SILENCE if self._flights[self._group(self._layout.place(rank).replica)] else None

    def stalled(self) -> Loss | None:
        """The first stage that holds its group up, where nobody reports anything although steps are in flight."""
        with self._changed:
            flights = [next(iter(group.values())) for group in self._flights if group]
            if not flights:
                return None
            oldest = min(flights, key=lambda flight: flight.launched)
            assert self._origin is not None
            since = perf_counter() - max(self._heard, self._origin + oldest.launched)
            if since <= self._config.patience:
                return None
            late = oldest.missing(self._layout.stages)
            assert late is not None
            return Loss(self._layout.rank(Place(*late, 0)), f"has not finished a step for {since:.0f} seconds")

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
        flights = self._flights[self._group(place.replica)].values()
        waiting = [flight.step.id for flight in flights if (place.replica, place.stage) not in flight.reports]
        last = f"the last step it finished was {finished}" if finished >= 0 else "it had finished no step"
        return f"it was in step {waiting[0]}, {last}" if waiting else f"it had no step to do, {last}"

    def _spokesman(self, rank: int) -> int:
        """Who reports for a team."""
        return self._layout.rank(self._layout.place(rank)._replace(tp_rank=0))


def _together(parts: Sequence[Done]) -> Done:
    """Of replicas that did a step together: it began with the first and ended with the last."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        started=min(part.started for part in parts),
        finished=max(part.finished for part in parts),
        host=max(part.host for part in parts),
        tokens={id: tokens for part in parts for id, tokens in part.tokens.items()},
        ended=tuple([id for part in parts for id in part.ended]),
        logprobs={id: told for part in parts for id, told in part.logprobs.items()},
    )


def _tokens(step: Step, done: Done) -> Iterator[tuple[int, Token]]:
    """What a step sampled, with ranks and positions; of sequences that go on: the others need no more tokens."""
    sampling = [part for part in step.slices if part.samples and part.lane == done.lane]
    places = {part.sequence: (part.rank, part.start + part.length) for part in sampling}
    for id, tokens in done.tokens.items():
        if id not in done.ended:
            rank, end = places[id]
            yield from ((rank, Token(id, end + place, token)) for place, token in enumerate(tokens))
