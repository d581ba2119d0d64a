"""The composed policy: small choices (budget, order, admission, victims, route, ...) and the one way to join them.

A budget says what a step is made of, as a sequence of phases; the other choices say who, where and at whose cost.
A rule that does not fit this shape implements `playground.policy.Policy` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Protocol

from playground.core import COPY_IN, COPY_OUT, Copy, RequestView, Spec
from playground.draft import Draft
from playground.policy import ClusterView
from playground.sequence import Sequence, State
from policies.admission import Always
from policies.align import Free, Ready
from policies.order import Fcfs
from policies.overlap import Overlap
from policies.placement import Static
from policies.route import RoundRobin
from policies.victims import LastArrived, Manner, how_to_give_way

FOREVER = 1 << 40
PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token for each decode; with a cap on rows, the least recently served first. Preempts where memory lacks.

    `of`: these decodes only, in this order.
    """

    rows: int = FOREVER
    of: tuple[Sequence, ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Go on with admitted prompts, up to so many tokens, in order of admission.

    A chunk shrinks to the memory there is and preempts nobody. `idle`: only prompts without a chunk in flight. `of`:
    these prompts only, in this order.
    """

    tokens: int = FOREVER
    idle: bool = False
    of: tuple[Sequence, ...] | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """Everything admitted in order of admission, decode or chunk alike, up to so many tokens. Preempts for memory.

    `each`: most tokens of one sequence.
    """

    tokens: int = FOREVER
    each: int = FOREVER


@dataclass(frozen=True, slots=True)
class Admissions:
    """Start waiting requests in the policy's order until one may not or does not fit.

    `whole`: prompts are not cut; one that is longer than `tokens` goes alone. `each`: most tokens of one sequence.
    `of`: these only, in this order, rather than the policy's.
    """

    tokens: int = FOREVER
    rows: int = FOREVER
    each: int = FOREVER
    whole: bool = False
    of: tuple[Sequence, ...] | None = None


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Take these running sequences' KV away, as the victims' `how` says."""

    of: tuple[Sequence, ...]


Phase = Decodes | Chunks | Running | Admissions | Preemptions


class Budget(Protocol):
    """What one step is made of.

    The phases are carried out one by one while the iterator is suspended, so that a budget may look at the draft in
    between (`draft.tokens`: placed so far; `draft.preempted`). A budget that decides by the present draft alone may say
    so in `steady(draft)`, by the most decodes it would put into a step while nothing but decodes tick (0: it would not
    serve all that are ready): then quiet stretches are simulated in one go.
    """

    def phases(self, draft: Draft) -> Iterator[Phase]: ...


class Order(Protocol):
    """Waiting sequences, first to serve first. It may be lazy: what it yields leaves the queue when admitted.

    One for which running sequences give up their seats has another method, `gives_way(draft, sequence)`: those that do
    so for this waiting one, who goes first first. Nothing is promised of steps while somebody waits, then.
    """

    def __call__(self, draft: Draft) -> Iterable[Sequence]: ...


class Admission(Protocol):
    """May this waiting sequence start now, with so many tokens in this step?

    It may turn it away for good instead (`draft.reject`). Two methods that it may have besides: `screen(draft)` looks
    at the queue before a step is planned; `preempted(draft)` hears of a step's victims when it is.
    """

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool: ...


class Victims(Protocol):
    """Who gives way to `needy`: a running sequence, `needy` itself included; and how."""

    @property
    def how(self) -> Manner: ...

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence: ...


class Route(Protocol):
    """Which rank serves a new request? None: not yet."""

    def __call__(self, request: RequestView, view: ClusterView) -> int | None: ...


class Align(Protocol):
    """May a rank in lockstep start prompts in this step? `ready`: could it. Asked once a draft, before its phases."""

    def __call__(self, draft: Draft, ready: Ready) -> bool: ...

    def check(self, spec: Spec) -> None:
        """Refuse a backend on which it can do nothing; one line that says what to set."""
        ...


class Lanes(Protocol):
    """What runs at the same time: see `policies.overlap.Overlap`."""

    @property
    def steady(self) -> bool: ...

    def outstanding(self, spec: Spec) -> int: ...

    def lane(self, sequence: Sequence) -> str: ...

    def due(self, draft: Draft, sequences: list[Sequence]) -> list[Sequence]: ...

    def admits(self, draft: Draft) -> bool: ...


class Placement(Protocol):
    """How many layers should each stage hold from this step on? None: as now."""

    def __call__(self, draft: Draft) -> tuple[int, ...] | None: ...

    def check(self, spec: Spec) -> None:
        """Refuse a backend on which it can do nothing; one line that says what to set."""
        ...


@dataclass(frozen=True, slots=True)
class Composed:
    """A policy made of choices.

    Whatever they are, it does not stall: with nothing else to do and nothing in flight, the oldest sequence goes on
    at the expense of the youngest (a half-prefilled prompt may lose its blocks, too), and an idle rank starts the
    first in its queue. Nor do sequences chase one another out of memory for ever: one that lost its KV `PATIENCE`
    times gives way only to older ones, and does not come back while such run.
    """

    budget: Budget
    order: Order = field(default_factory=Fcfs)
    admission: Admission = field(default_factory=Always)
    victims: Victims = field(default_factory=LastArrived)
    route: Route = field(default_factory=RoundRobin)
    align: Align = field(default_factory=Free)
    overlap: Lanes = field(default_factory=Overlap)
    placement: Placement = field(default_factory=Static)

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        return self.route(request, view)

    def run_ahead(self, spec: Spec) -> int:
        self.align.check(spec)
        self.placement.check(spec)
        return self.overlap.outstanding(spec)

    def steady(self, draft: Draft) -> int:
        """All that run are decoding and were served, and nobody else can come in before one of them ends.

        In a pipeline the steps in flight take turns: each comes back to find its own sequences ready and no others.
        """
        if not (steady := getattr(self.budget, "steady", None)) or draft.partial or draft.layers:
            return 0
        if not self.overlap.steady:
            return 0
        if draft.tokens != len(draft.decoding) or (draft.waiting and (draft.seats > 0 or self._takes_over)):
            return 0
        rows = [step.columns.rank.count(draft.rank) for step in draft.in_flight]
        if draft.tokens + sum(rows) != len(draft.running):
            return 0
        return FOREVER if max(rows, default=draft.tokens) <= steady(draft) else 0

    def fill(self, draft: Draft) -> None:
        if draft.waiting and (screen := getattr(self.admission, "screen", None)):
            screen(draft)
        starts = self.align(draft, self._ready)
        for phase in self.budget.phases(draft):
            self._carry_out(phase, draft, starts)
        if draft.empty and draft.wake_at == inf and not _in_flight(draft):
            self._keep_moving(draft, starts)
        if draft.preempted:
            tell_of_victims(self.admission, draft)
        if draft.layers and (layers := self.placement(draft)):
            draft.move_layers(layers)

    def _carry_out(self, phase: Phase, draft: Draft, starts: bool) -> None:
        match phase:
            case Decodes(rows, of):
                decodes = draft.decoding if of is None else list(of)
                self._serve(draft, _first_rows(self.overlap.due(draft, decodes), rows), FOREVER, 1)
            case Chunks(tokens, idle, of):
                self._continue(draft, draft.partial if of is None else list(of), tokens, idle)
            case Running(tokens, each):
                self._serve(draft, self.overlap.due(draft, draft.due), tokens, each)
            case Admissions() if self.overlap.admits(draft):
                self._admit(draft, phase, starts)
            case Preemptions(of):
                for sequence in of:
                    draft.preempt(sequence, how_to_give_way(draft, sequence, self.victims.how))

    # --- running sequences

    def _serve(self, draft: Draft, queue: list[Sequence], tokens: int, each: int) -> None:
        place, most = 0, draft.tokens + min(tokens, draft.tokens_left)
        # `draft.tokens` falls when a victim had been placed before: its share goes to those after it.
        while place < len(queue) and (left := most - draft.tokens) > 0:
            place += draft.take_decodes(queue[place : place + left], self.overlap.lane(queue[place]))
            if place == len(queue) or (left := most - draft.tokens) <= 0:
                return
            sequence = queue[place]
            place += 1
            if not draft.ready(sequence):  # a victim of one before it
                continue
            placed = self._insist(draft, sequence, min(sequence.remaining, left, each))
            if not placed and sequence.state is State.RUNNING:
                return  # room will come when a victim's slices in flight commit

    def _insist(self, draft: Draft, needy: Sequence, tokens: int) -> int:
        """Place the tokens, taking memory from others if need be; 0 if `needy` itself gave way, or must wait."""
        while (need := draft.blocks_needed(needy, tokens)) > draft.blocks_free:
            if draft.blocks_free + _coming_free(draft) >= need:
                return 0
            victim = self._victim(draft, needy)
            if victim is needy and _coming_back(draft):
                return 0  # sequences that hold memory, and cannot be victims before they run again
            draft.preempt(victim, how_to_give_way(draft, victim, self.victims.how))
            if victim is needy:
                return 0
        return draft.take(needy, tokens, self.overlap.lane(needy))

    def _victim(self, draft: Draft, needy: Sequence) -> Sequence:
        """The victims' choice, unless that one has suffered enough to give way to its elders only."""
        chosen = self.victims(draft, needy)
        if chosen.preemptions < PATIENCE or _age(chosen) > _age(needy):
            return chosen
        younger = [sequence for sequence in draft.running if _age(sequence) > _age(needy)]
        return max(younger, key=_age, default=needy)

    def _continue(self, draft: Draft, prompts: list[Sequence], tokens: int, idle: bool) -> None:
        left = tokens
        for sequence in self.overlap.due(draft, prompts):
            if left <= 0 or draft.tokens_left <= 0:
                return
            if draft.ready(sequence) and not (idle and sequence.in_flight):
                left -= draft.take(sequence, min(left, draft.room(sequence)), self.overlap.lane(sequence))

    # --- waiting sequences

    def _admit(self, draft: Draft, phase: Admissions, starts: bool) -> None:
        if not draft.waiting:
            return
        left, rows = min(phase.tokens, draft.tokens_left), phase.rows
        for sequence in self.order(draft) if phase.of is None else phase.of:
            if left <= 0 or rows <= 0 or (draft.seats < 1 and not self._takes_over):
                return
            if not starts and sequence.state is State.WAITING:
                return
            placed = self._start(draft, sequence, phase, left) if draft.seats > 0 else None
            if placed is None and self._takes_over:
                placed = self._take_over(draft, sequence, phase, left)
            if placed is None:
                return
            left, rows = left - placed, rows - bool(placed)

    def _start(self, draft: Draft, sequence: Sequence, phase: Admissions, left: int) -> int | None:
        """Tokens placed of a waiting sequence (0 while its KV is copied back, or if it had to be turned away)."""
        if _must_wait(draft, sequence):
            return None
        if sequence.state is State.SWAPPED:  # with room for its next token, or it would be the next victim
            return 0 if self.admission(draft, sequence, 1) and draft.swap_in(sequence) else None
        if phase.whole and sequence.request.prompt_length > draft.spec.max_tokens:
            draft.reject(sequence, _too_long(sequence, draft.spec))
            return 0
        tokens = min(sequence.remaining - draft.prefix_hit(sequence), phase.each)
        if phase.whole and tokens > left and draft.tokens:
            return None
        tokens = tokens if phase.whole else min(tokens, left)
        if not self.admission(draft, sequence, tokens):
            return 0 if sequence.state is State.ENDED else None
        return draft.take(sequence, tokens, self.overlap.lane(sequence)) or None

    @property
    def _takes_over(self) -> bool:
        return hasattr(self.order, "gives_way")

    def _take_over(self, draft: Draft, heir: Sequence, phase: Admissions, left: int) -> int | None:
        """Tokens placed of a waiting sequence for which running ones give up their seats and memory, if they do.

        Nobody gives way if that would not make room for all of it, nor for a prompt that is too long for the step.
        """
        if phase.whole and draft.tokens and heir.remaining - draft.prefix_hit(heir) > left:
            return None
        rivals = self._rivals(draft, heir)
        room = draft.blocks_free + _coming_free(draft) + sum(len(rival.blocks) for rival in rivals)
        if room < draft.blocks_needed(heir, heir.remaining):
            return None
        for rival in rivals:
            if _coming_free(draft):
                return None
            draft.preempt(rival, how_to_give_way(draft, rival, self.victims.how))
            if draft.seats > 0 and (placed := self._start(draft, heir, phase, left)) is not None:
                return placed
        return None

    def _rivals(self, draft: Draft, heir: Sequence) -> list[Sequence]:
        """Who gives way to it, but for those that have suffered enough to do so for their elders only."""
        if _must_wait(draft, heir):
            return []
        rivals: list[Sequence] = self.order.gives_way(draft, heir)  # type: ignore[attr-defined]
        return [rival for rival in rivals if rival.preemptions < PATIENCE or _age(rival) > _age(heir)]

    def _ready(self, draft: Draft) -> bool:
        """Whether the first in the queue could start now, were there a budget for it."""
        if not draft.waiting or draft.seats < 1:
            return False
        head = next(iter(self.order(draft)), None)
        if head is None or head.state is not State.WAITING or _must_wait(draft, head):
            return False
        hit = draft.prefix_hit(head)
        tokens = min(head.remaining - hit, draft.tokens_left)
        return draft.blocks_needed(head, hit + tokens) <= draft.blocks_free and self.admission(draft, head, tokens)

    # --- progress

    def _keep_moving(self, draft: Draft, starts: bool) -> None:
        if draft.running:
            oldest, *others = sorted(draft.running, key=_age)
            while draft.room(oldest) < 1 and others:
                draft.preempt(others.pop())
            draft.take(oldest, draft.room(oldest), self.overlap.lane(oldest))
        elif (head := next(iter(self.order(draft)), None)) is not None:
            if head.state is State.SWAPPED:
                draft.swap_in(head)
            elif starts:
                draft.take(head, head.remaining, self.overlap.lane(head))


def tell_of_victims(admission: Admission, draft: Draft) -> None:
    """Those of this draft, if the admission wants to know of them."""
    if told := getattr(admission, "preempted", None):
        told(draft)


def _coming_free(draft: Draft) -> int:
    """Blocks that victims hold until their last slice commits or their copy is done."""
    return draft.blocks_freeing + sum(len(copy.source) for copy in _copies(draft, COPY_OUT))


def _coming_back(draft: Draft) -> bool:
    """Whether any sequence is being swapped in."""
    return any(True for _ in _copies(draft, COPY_IN))


def _copies(draft: Draft, lane: str) -> Iterator[Copy]:
    """Of this rank, in flight and of this draft."""
    copies = chain(*[step.copies for step in draft.in_flight], draft.copies)
    return (copy for copy in copies if copy.lane == lane and copy.rank == draft.rank)


def _must_wait(draft: Draft, sequence: Sequence) -> bool:
    """Whether it lost its KV so often that it comes back only when its elders have ended."""
    if sequence.preemptions < PATIENCE:
        return False
    return any(_age(other) < _age(sequence) for other in draft.running)


def _in_flight(draft: Draft) -> bool:
    """Whether anything of this rank is: in lockstep, others may go on for ever."""
    rank, steps = draft.rank, draft.in_flight
    return any(rank in step.columns.rank or any(copy.rank == rank for copy in step.copies) for step in steps)


def _first_rows(decoding: list[Sequence], rows: int) -> list[Sequence]:
    if rows >= len(decoding):
        return decoding
    return sorted(decoding, key=lambda sequence: sequence.step)[:rows]


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival, sequence.id


def _too_long(sequence: Sequence, spec: Spec) -> str:
    return (
        f"prompt {sequence.request.prompt_length} must be computed in one step of at most {spec.max_tokens} tokens: "
        "raise limits.max_tokens or choose a policy that cuts prompts into chunks"
    )
