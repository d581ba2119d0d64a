"""Small stand-ins on both sides of the seam: a backend of thirty lines, policies of three."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from playground.core import MAIN, Done, Request, Spec, Step
from playground.draft import Draft
from playground.scheduler import Scheduler
from playground.sequence import State


class FakeBackend:
    """A clock and a list. `seconds(step, lane)` says how long a lane takes; `lengths` how many tokens a sequence gets.

    Everything launched runs at once: a device without limits.
    """

    def __init__(self, spec: Spec, seconds: Callable[[Step, str], float] = lambda step, lane: 1.0) -> None:
        self.spec = spec
        self.seconds = seconds
        self.time = 0.0
        self.launched: list[Step] = []
        self.ending: dict[int, int] = {}
        self._flights: list[tuple[float, int, str]] = []

    def now(self) -> float:
        return self.time

    def launch(self, step: Step) -> None:
        for request in step.starts:
            self.ending[request.id] = request.prompt_length + (request.output_length or request.max_tokens) - 1
        self.launched.append(step)
        self._flights += [(self.time + self.seconds(step, lane), step.id, lane) for lane in step.lanes]

    def wait(self, until: float = inf) -> Done | None:
        if not self._flights and until == inf:
            raise RuntimeError("nothing is in flight")
        first = min(self._flights, default=(inf, 0, MAIN))
        if first[0] > until:
            self.time = max(self.time, until)
            return None
        self._flights.remove(first)
        self.time = first[0]
        return done(self.launched[first[1]], first[2], self.time, self.ending)

    def close(self) -> None: ...


def done(step: Step, lane: str = MAIN, now: float = 0.0, ending: dict[int, int] | None = None, tokens: int = 1) -> Done:
    """The completion of one lane; those end whose last position was computed."""
    parts = [part for part in step.slices if part.lane == lane and part.samples]
    ended = [part.sequence for part in parts if (ending or {}).get(part.sequence) == part.start + part.length]
    return Done(
        step.id, lane, step.planned, step.planned, now, {part.sequence: (0,) * tokens for part in parts}, tuple(ended)
    )


class Greedy:
    """Everything as soon as it fits, on whatever rank has the fewest; `moves` replace the first fills."""

    def __init__(self, *moves: Callable[[Draft], object], run_ahead: int = 1) -> None:
        self.moves = list(moves)
        self.depth = run_ahead

    def fill(self, draft: Draft) -> None:
        if self.moves:
            self.moves.pop(0)(draft)
        else:
            everything(draft)

    def place(self, request, view) -> int | None:
        return min(view.loads, key=lambda load: (load.waiting + load.running, load.rank)).rank

    def run_ahead(self, spec: Spec) -> int:
        return self.depth

    def steady(self, draft: Draft) -> int:
        return 0


def everything(draft: Draft) -> None:
    draft.take_decodes(draft.decoding)
    for sequence in [*draft.partial, *draft.waiting]:
        if sequence.state is State.SWAPPED:
            draft.swap_in(sequence)
        else:
            draft.take(sequence, sequence.remaining)


def nothing(draft: Draft) -> None: ...


class Log:
    """A recorder that keeps everything and checks the scheduler's accounts at every turn."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.steps: list[Step] = []
        self.dones: list[Done] = []
        self.events: list[str] = []
        self.outcomes: dict[int, str] = {}
        self.tokens: dict[int, int] = {}
        self.looks: list[float] = []

    def arrived(self, request: Request) -> None: ...

    def looked(self, now: float, commits: int) -> None:
        self.looks.append(now)

    def waits(self) -> None: ...

    def launched(self, step: Step, group: object) -> None:
        self.scheduler.check()
        self.steps.append(step)

    def committed(self, done: Done, step: Step) -> None:
        self.scheduler.check()
        self.dones.append(done)

    def happened(self, event) -> None:
        self.events.append(event.kind)

    def ended(self, ended) -> None:
        self.outcomes[ended.request.id] = ended.outcome
        self.tokens[ended.request.id] = ended.sequence.returned
