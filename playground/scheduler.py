"""The scheduler: turns arrivals and completions into steps by asking a policy, and keeps every account.

It reads no clock (times are arguments), touches no device, and looks at no output length: a backend says which
sequences ended. Lengths go on to the oracles among the policy's parts, and to nobody else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf
from random import Random

from playground.core import COPY_OUT, Columns, Copy, Done, LayerMove, Request, Spec, Step, Turn
from playground.draft import Draft, Preempted
from playground.oracle import oracles
from playground.policy import ClusterView, Load, Loads, Policy
from playground.rank import Rank, chained_keys
from playground.reports import Reports, check_reports
from playground.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that gets no more tokens. `outcome`: finished, rejected or aborted, `why` for the latter two."""

    request: Request
    sequence: Sequence
    outcome: str
    finished: float
    why: str = ""


SEND = "send"
"""The kind of event that a sequence's move to another rank is."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a step's slices do not show: a preemption, a rejection, an abort, a move, a copy that ended.

    `sequence` is None where it is nobody's: layers that change their stage.
    """

    now: float
    kind: str
    sequence: int | None
    rank: int
    detail: str = ""


@dataclass(slots=True)
class Flight:
    """A step in flight, the lanes of it that have not come back, and how far its repetitions are accounted for."""

    step: Step
    lanes: set[str]
    shown: Step
    """What policies see of it."""
    planned: int = 1
    done: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    """Of a step that may be repeated: of its slices."""
    blocks: dict[int, list[int]] = field(default_factory=dict)
    """What repetitions took, by slice."""


@dataclass(slots=True)
class Group:
    """Ranks that step together, their steps in flight and what their backend has not been told yet."""

    index: int
    ranks: tuple[Rank, ...]
    flights: dict[int, Flight] = field(default_factory=dict)
    ordinal: int = 0
    """Steps launched so far."""
    starts: dict[int, Request] = field(default_factory=dict)
    """Requests that no step of this group has named yet."""
    ends: list[int] = field(default_factory=list)
    wake: float = inf
    layers: tuple[int, ...] = ()
    """Of each stage, where they can move."""

    @property
    def live(self) -> bool:
        return any(rank.live for rank in self.ranks)


class Scheduler:
    """Sequences, KV blocks and steps in flight of all ranks.

    `prefix_cache`: share KV of equal prompt prefixes. `requeue`: where a preempted sequence waits, `front` or `back`.
    `report_interval`, `report_steps`, `report_delay`: see `Reports`; with neither interval nor steps a router sees
    present loads.
    """

    def __init__(
        self,
        spec: Spec,
        policy: Policy,
        seed: int = 0,
        prefix_cache: bool = True,
        requeue: str = "front",
        report_interval: float = 0.0,
        report_steps: int = 0,
        report_delay: float = 0.0,
    ) -> None:
        if requeue not in ("front", "back"):
            raise ValueError(f"requeue={requeue} must be front or back")
        check_reports(report_interval, report_steps, report_delay)
        self.spec = spec
        self.policy = policy
        self._oracles = oracles(policy)
        self.rng = Random(seed)
        self.ranks = tuple(Rank(i, spec, prefix_cache, requeue == "front") for i in range(spec.ranks))
        self.groups = tuple(
            Group(i, tuple(self.ranks[rank] for rank in ranks), layers=spec.layers)
            for i, ranks in enumerate(spec.groups)
        )
        self._group_of = {rank.index: group for group in self.groups for rank in group.ranks}
        self.limit = spec.stages * self._run_ahead(policy, spec)
        """Steps that a group may have in flight."""
        self.sequences: dict[int, Sequence] = {}
        self._requests: dict[int, Request] = {}
        self._held: deque[Request] = deque()
        late = len(self.ranks) > 1 and (report_interval or report_steps)
        self._reports = Reports(self.ranks, report_interval, report_steps, report_delay) if late else None
        self._group_of_step: dict[int, Group] = {}
        self._stirred: set[int] = set()
        """Groups that may be open."""
        self._waking: dict[int, Group] = {}
        """Groups whose policy wants to be asked again."""
        self._steps = 0
        self.turns: Callable[[int, bool], list[Turn]] | None = None
        """Asks a backend that repeats steps how far a group's are, and, if so told, to stop repeating them."""
        self.ended: list[Ended] = []
        """Requests that ended since somebody took this list."""
        self.events: list[Event] = []

    @staticmethod
    def _run_ahead(policy: Policy, spec: Spec) -> int:
        depth = policy.run_ahead(spec)
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"run_ahead={depth} must be a whole number of at least 1")
        return depth

    # --- state

    @property
    def live(self) -> bool:
        """Whether any request is unfinished or any step in flight."""
        return bool(self._requests or self._held or self.in_flight)

    @property
    def in_flight(self) -> bool:
        return bool(self._group_of_step)

    def open(self, group: Group) -> bool:
        """Whether the group's policy would be asked now: there is work, and one more step may be in flight."""
        return len(group.flights) < self.limit and (bool(self._held) or group.live)

    @property
    def opened(self) -> list[Group]:
        """All groups that are open, in order; of however many, only those that something happened to are looked at."""
        if self._held:
            return [group for group in self.groups if self.open(group)]
        found = [group for group in map(self.groups.__getitem__, sorted(self._stirred)) if self.open(group)]
        if len(found) < len(self._stirred):
            self._stirred = {group.index for group in found}
        return found

    @property
    def wake(self) -> float:
        """When a policy wants to be asked again though nothing happened."""
        if not self._waking:
            return inf
        return min([group.wake for group in self._waking.values() if self.open(group)], default=inf)

    @property
    def waiting(self) -> int:
        return len(self._held) + sum(len(rank.waiting) for rank in self.ranks)

    def request(self, id: int) -> Request:
        """A request that has not ended."""
        return self._requests[id]

    # --- arrivals

    def arrive(self, request: Request, now: float) -> None:
        """Take a request in, or reject it if it could never be served."""
        self._pass(now)
        if request.id in self._requests or any(request.id in rank.limbo for rank in self.ranks):
            raise ValueError(f"request {request.id} arrived twice: ids must be unique among unfinished requests")
        for oracle in self._oracles:
            oracle.learn(request)
        self._requests[request.id] = request
        if why := self.impossible(request):
            self._finish(Sequence(request, 0), now, "rejected", why)
        elif not self._place(request, now):
            self._held.append(request)
            for group in self.groups:  # each asks again at every step
                self._catch_up(group, stop=True)

    def impossible(self, request: Request) -> str | None:
        """Why a request could never be served, however idle the system; None if it could."""
        spec, most = self.spec, request.prompt_length + request.max_tokens - 1
        if most > spec.max_length:
            return f"prompt {request.prompt_length} + max_tokens {request.max_tokens} exceeds {spec.max_length} tokens"
        if (need := spec.blocks_for(most)) > spec.blocks:
            return (
                f"prompt {request.prompt_length} + max_tokens {request.max_tokens} needs {need} KV blocks, "
                f"the pool has {spec.blocks}"
            )
        return None

    def _place(self, request: Request, now: float) -> bool:
        rank = 0 if len(self.ranks) == 1 else self._ask_for_rank(request, now)
        if rank is None:
            return False
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"{type(self.policy).__name__}.place answered rank {rank}: there are {len(self.ranks)}")
        sequence = Sequence(request, rank)
        sequence.keys = self.ranks[rank].keys(request)
        self.sequences[request.id] = sequence
        group = self._group_of[rank]
        group.starts[request.id] = request
        self._catch_up(group, stop=True)
        self._stirred.add(group.index)
        self.ranks[rank].enqueue(sequence)
        return True

    def _ask_for_rank(self, request: Request, now: float) -> int | None:
        reports = self._reports
        taken, loads = reports.seen(now) if reports else (now, Loads(self._loads, len(self.ranks)))

        size = self.spec.block_size
        # Of values and ranks, not of the request: what a router is given must not lead to an output length.
        prefix = partial(chained_keys, request.hashes, request.hash_block, request.prompt_length, size)
        hit = partial(_prefix_hit, self.ranks, prefix)
        view = ClusterView(now, taken, loads, self.rng, hit, reports is None, prefix, size)
        return self.policy.place(request.view(), view)

    def _pass(self, now: float) -> None:
        """Something is about to change: what ranks report until now is as it was."""
        if self._reports:
            self._reports.passing(now)

    @property
    def report_due(self) -> float:
        """When somebody will look at all ranks, though nobody will be asked anything; `inf` if nothing changes then."""
        return self._reports.due if self._reports and self.turns else inf

    def report(self) -> None:
        """Take the report that is due, of what was true just before."""
        assert self._reports
        for group in self.groups:
            self._catch_up(group)
        self._reports.passing(self._reports.due)

    def _place_held(self, now: float) -> None:
        while self._held and self._place(self._held[0], now):
            self._held.popleft()

    def abort(self, id: int, now: float) -> None:
        """The client of a request went away. Unknown or ended requests are no error: the abort came too late."""
        request = self._requests.get(id)
        if request is None:
            return
        self._pass(now)
        if id in self.sequences:
            sequence = self.sequences[id]
            self._catch_up(self._group_of[sequence.rank], stop=True)
            self.ranks[sequence.rank].end(sequence)
        else:
            self._held.remove(request)
            sequence = Sequence(request, 0)
        self.events.append(Event(now, "abort", id, sequence.rank))
        self._finish(sequence, now, "aborted", "aborted by the client")

    def _finish(self, sequence: Sequence, now: float, outcome: str, why: str = "") -> None:
        request = self._requests.pop(sequence.id)
        for oracle in self._oracles:
            oracle.forget(sequence.id)
        known = self.sequences.pop(sequence.id, None) is not None
        group = self._group_of[sequence.rank]
        if known and group.starts.pop(sequence.id, None) is None:
            group.ends.append(sequence.id)
        self.ended.append(Ended(request, sequence, outcome, now, why))

    # --- planning

    def next_step(self, group: Group, now: float) -> Step | None:
        """Ask the policy for the group's next step; None if it has none (or may have no more in flight)."""
        if self._reports:
            self._reports.passing(now)
        if self._held:
            self._place_held(now)
        if not self.open(group):
            return None
        self._catch_up(group)
        drafts = self._drafts(group, now)
        group.wake = min([draft.wake_at for draft in drafts])
        if group.wake < inf:
            self._waking[group.index] = group
        else:
            self._waking.pop(group.index, None)
        if all(draft.empty for draft in drafts):
            if any(draft.preempted or draft.rejected or draft.sent for draft in drafts):
                self._catch_up(group, stop=True)
            return None
        return self._launch(group, drafts, now)

    def _drafts(self, group: Group, now: float) -> list[Draft]:
        """One a rank, filled in order; each sees those after it as they are before."""
        in_flight = tuple(flight.shown for flight in group.flights.values())
        drafts: list[Draft] = []
        for rank in reversed(group.ranks):  # who knew those before it, too, would make a cycle of them
            peers = tuple(reversed(drafts))
            drafts.append(Draft(rank, self.spec, now, self.rng, in_flight, group.ordinal + 1, group.layers, peers))
        drafts.reverse()
        for draft in drafts:
            self.policy.fill(draft)
            self._record(draft)
        return drafts

    def _record(self, draft: Draft) -> None:
        for victim in draft.preempted:
            self.events.append(Event(draft.now, victim.how.value, victim.sequence.id, draft.rank, _state(victim)))
        for reject in draft.rejected:
            self.events.append(Event(draft.now, "reject", reject.request, draft.rank, reject.why))
            self._finish(self.sequences[reject.request], draft.now, "rejected", reject.why)
        for sequence, rank in draft.sent:
            self.events.append(Event(draft.now, SEND, sequence.id, draft.rank, f"to rank {rank}"))
            self._send(sequence, rank)

    def _send(self, sequence: Sequence, rank: int) -> None:
        old, new = self._group_of[sequence.rank], self._group_of[rank]
        request = self._requests[sequence.id]
        if old is not new:
            if old.starts.pop(sequence.id, None) is None:
                old.ends.append(sequence.id)
            new.starts[sequence.id] = request
        sequence.rank = rank
        sequence.epoch += 1
        self._catch_up(new, stop=True)
        self._stirred.add(new.index)
        self.ranks[rank].enqueue(sequence)

    def _launch(self, group: Group, drafts: list[Draft], now: float) -> Step:
        slices = drafts[0].columns if len(drafts) == 1 else Columns.joined([draft.columns for draft in drafts])
        copies = tuple(chain.from_iterable([draft.copies for draft in drafts]))
        starts = self._first_seen(group, drafts, slices)
        ends, group.ends = tuple(group.ends), []
        computing = set(slices.rank) if self.spec.lockstep else ()
        dummies = tuple(rank.index for rank in group.ranks if rank.index not in computing) if computing else ()
        move = self._move(group, drafts, now) if self.spec.spare_layers else None
        repeat = self._repeat(group, drafts, slices, copies) if self.spec.repeats else 1
        if repeat == 1:
            self._catch_up(group, stop=True)
        step = Step(self._steps, group.index, now, slices, copies, starts, ends, dummies, repeat, move)
        self._check_limits(step.columns)
        self._steps += 1
        group.ordinal += 1
        group.flights[step.id] = Flight(step, set(step.lanes), step.without_requests())
        self._group_of_step[step.id] = group
        self._count_in(step.columns)
        return step

    def _move(self, group: Group, drafts: list[Draft], now: float) -> LayerMove | None:
        """The first rank's wish: a group has its layers in common."""
        if move := next((draft.move for draft in drafts if draft.move), None):
            group.layers = move.layers
            layers = "-".join(map(str, move.layers))
            self.events.append(Event(now, "layers", None, group.ranks[0].index, f"to {layers}, {move.blocks} blocks"))
        return move

    def _check_limits(self, slices: Columns) -> None:
        """The verbs of a draft cannot exceed them; a policy that reaches around the verbs is found here."""
        if sum(slices.length) <= self.spec.max_tokens:  # of all ranks: then none of them has more
            return
        tokens: dict[int, int] = {}
        for rank, length in zip(slices.rank, slices.length, strict=True):
            tokens[rank] = tokens.get(rank, 0) + length
        if (most := max(tokens.values())) > self.spec.max_tokens:
            policy = type(self.policy).__name__
            raise ValueError(f"{policy} put {most} tokens into a step of at most {self.spec.max_tokens}")

    def _first_seen(self, group: Group, drafts: list[Draft], slices: Columns) -> tuple[Request, ...]:
        """Requests that no step named before. Only who was admitted now can be among them."""
        if not any(draft.admitted for draft in drafts):
            return ()
        starts = group.starts
        named = [id for id in slices.sequence if id in starts]
        return tuple([starts.pop(id) for id in dict.fromkeys(named)])

    def _count_in(self, slices: Columns) -> None:
        sequences = map(self.sequences.__getitem__, slices.sequence)
        for sequence, start, length in zip(sequences, slices.start, slices.length, strict=True):
            sequence.in_flight += 1
            if start < sequence.target:
                sequence.recomputed += min(start + length, sequence.target) - start

    # --- repetitions

    def _repeat(
        self,
        group: Group,
        drafts: list[Draft],
        slices: Columns,
        copies: tuple[Copy, ...],
    ) -> int:
        """How often the step may be repeated with the same outcome: nothing but decodes, and blocks for all."""
        if copies or self.limit > self.spec.stages or self._held:
            return 1
        for draft in drafts:
            if draft.preempted or draft.rejected or draft.sent or draft.move or draft.wake_at < inf:
                return 1
        rows = len(slices.sequence)
        if slices.length.count(1) < rows or not all(slices.samples) or any(slices.drafted):
            return 1
        if slices.lane.count(slices.lane[0]) < rows:
            return 1
        promised = min(map(self.policy.steady, drafts))
        if self._reports and (left := self._reports.steps_left(group.ranks[0].index)) is not None:
            promised = min(promised, left - 1) if self.spec.stages == 1 else 0
        return 1 + self._most_ticks(group, slices, promised) if promised > 0 else 1

    def _most_ticks(self, group: Group, slices: Columns, most: int) -> int:
        """Of those up to `most`, how many more decodes of all that run there is memory for."""
        sequences = list(map(self.sequences.__getitem__, slices.sequence))
        most = min(most, min([sequence.max_tokens - sequence.promised for sequence in sequences]))
        size = self.spec.block_size
        if self.spec.stages == 1 and len(group.ranks) == 1:
            return _ticks_that_fit(sequences, most, group.ranks[0].pool.free, size)
        for rank in group.ranks:
            # Those in flight may be one repetition ahead of these.
            most = _ticks_that_fit(list(rank.running.values()), most + 1, rank.pool.free, size) - 1
        return max(most, 0)

    def _catch_up(self, group: Group, stop: bool = False) -> None:
        """Account for what the backend repeated meanwhile; `stop`: something changes, so that it repeats no more."""
        if self.turns and group.flights and (turns := self.turns(group.index, stop)):
            self._repeated(group, turns)

    def _loads(self) -> list[Load]:
        for group in self.groups:
            self._catch_up(group)
        return [rank.load() for rank in self.ranks]

    def _repeated(self, group: Group, turns: list[Turn]) -> None:
        """As if each repetition had been planned and committed by itself.

        The flights took turns, so that who was decided last says when all others were; blocks are taken in that order.
        """
        flights = [group.flights[turn.step] for turn in turns]
        for flight in flights:
            if not flight.sequences:
                flight.sequences = [self.sequences[id] for id in flight.step.columns.sequence]
        extras = [turn.planned - flight.planned for turn, flight in zip(turns, flights, strict=True)]
        self._take_blocks(flights, extras)
        group.ordinal += sum(extras)
        last = group.ordinal - len(turns) + 1
        for place, (turn, flight, extra) in enumerate(zip(turns, flights, extras, strict=True)):
            done = turn.done - flight.done
            for sequence in flight.sequences:
                sequence.launched += extra
                sequence.promised += extra
                sequence.length += extra
                sequence.returned += done
                if extra:
                    sequence.step = last + place
            flight.planned, flight.done = turn.planned, turn.done
            if extra and len(group.flights) > 1:  # oldest first
                group.flights[turn.step] = group.flights.pop(turn.step)

    def _take_blocks(self, flights: list[Flight], extras: list[int]) -> None:
        crossings = _block_crossings([flight.sequences for flight in flights], extras, self.spec.block_size)
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for _, turn, place in crossings:
            by_rank.setdefault(flights[turn].sequences[place].rank, []).append((turn, place))
        for rank, takers in by_rank.items():
            for (turn, place), block in zip(takers, self.ranks[rank].pool.allocate(len(takers)), strict=True):
                flights[turn].sequences[place].blocks.append(block)
                flights[turn].blocks.setdefault(place, []).append(block)

    # --- completions

    def commit(self, done: Done) -> Step:
        """Take back one lane of a step; the step it belonged to, with the blocks that its repetitions took."""
        group = self._group_of_step.get(done.step)
        if group is None:
            raise ValueError(f"step {done.step} is not in flight")
        if self._reports:
            self._reports.passing(done.finished)
        self._catch_up_with(group, done)
        flight = self._flight(group, done)
        step = flight.step
        flight.lanes.remove(done.lane)
        self._stirred.add(group.index)
        if not flight.lanes:
            del group.flights[step.id], self._group_of_step[step.id]
        if self._is_plain(group, step, done):
            self._commit_tokens(flight, done)
        else:
            self._commit_slices(flight, done)
        for copy in step.copies:
            if copy.lane == done.lane:
                self._commit_copy(copy, done.finished)
        if self._reports and not flight.lanes:
            self._reports.stepped(group.ranks, done.finished, done.count)
        return _with_blocks(flight) if flight.blocks else step

    def _catch_up_with(self, group: Group, done: Done) -> None:
        """Of all steps in flight, what comes back was decided first; its last repetition is committed with it.

        That a step comes back is what those that take turns with it were promised, if none of its sequences ends.
        """
        if not self.turns:
            turns = []
        else:
            copied = group.flights[done.step].step.copies
            stop = bool(done.ended or copied or any(rank.limbo for rank in group.ranks))
            turns = self.turns(group.index, stop)
        if done.count > 1:
            turns.insert(0, Turn(done.step, done.count, done.count - 1))
        if turns:
            self._repeated(group, turns)

    def _flight(self, group: Group, done: Done) -> Flight:
        flight = group.flights[done.step]
        if done.lane not in flight.lanes:
            raise ValueError(f"step {done.step} has no lane {done.lane} in flight")
        for id, other in group.flights.items():
            if id == done.step:
                break
            if done.lane in other.lanes:
                raise ValueError(f"step {done.step} came back before step {id} of the same lane, {done.lane}")
        return flight

    @staticmethod
    def _is_plain(group: Group, step: Step, done: Done) -> bool:
        """Whether every slice gave the tokens that were promised, and nobody was given up meanwhile."""
        if len(step.lanes) > 1 or any(step.columns.drafted) or any(rank.limbo for rank in group.ranks):
            return False
        counts = list(map(len, done.tokens.values()))
        return len(counts) == counts.count(done.count) == len(step.columns.samples) == step.columns.samples.count(True)

    def _commit_tokens(self, flight: Flight, done: Done) -> None:
        """Of a plain step: most of a simulation is this loop."""
        columns, new = flight.step.columns, done.count - flight.done
        first = done.ticks[0] if done.ticks else done.finished
        for place, sequence in enumerate(map(self.sequences.__getitem__, columns.sequence)):
            sequence.in_flight -= 1
            sequence.returned += new
            if sequence.first_token is None:
                sequence.first_token = first
            if sequence.keys and sequence.published < len(sequence.keys):
                self.ranks[sequence.rank].publish(sequence, columns.start[place] + columns.length[place])
        if done.ended:
            ended = set(done.ended)
            for id in columns.sequence:  # in this order, whatever the backend's
                if id in ended:
                    self._end(self.sequences[id], done.finished)

    def _end(self, sequence: Sequence, now: float) -> None:
        self.ranks[sequence.rank].end(sequence)
        self._finish(sequence, now, "finished")

    def _commit_slices(self, flight: Flight, done: Done) -> None:
        step, known = flight.step, flight.done
        ended, tokens, due, lanes = set(done.ended), done.tokens, done.count, len(step.lanes)
        first = done.ticks[0] if done.ticks else done.finished
        sequences = map(self.sequences.get, step.columns.sequence)
        # All at once: most of a commit is this loop.
        for sequence, (id, _, index, start, length, samples, _, lane, drafted) in zip(
            sequences, zip(*step.columns, strict=True), strict=True
        ):
            if lanes > 1 and lane != done.lane:
                continue
            if sequence is None:
                self._commit_late(id, index)
                continue
            sequence.in_flight -= 1
            if sequence.keys and sequence.published < len(sequence.keys) and sequence.state is State.RUNNING:
                self.ranks[index].publish(sequence, start + length)
            if samples:
                count = len(tokens.get(id, ()))
                if count != due or drafted:
                    self._take_off(sequence, drafted, done, count)
                sequence.returned += count - known
                if sequence.first_token is None:
                    sequence.first_token = first
            if id in ended:
                self._end(sequence, done.finished)
            if not sequence.in_flight and id in self.ranks[index].limbo:
                self.ranks[index].settle(sequence)

    def _commit_late(self, id: int, index: int) -> None:
        """A slice of a sequence that ended meanwhile: its tokens are dropped, its blocks go with the last one."""
        rank = self.ranks[index]
        sequence = rank.limbo[id]
        sequence.in_flight -= 1
        if sequence.in_flight == 0:
            rank.settle(sequence)

    def _take_off(self, sequence: Sequence, drafted: int, done: Done, count: int) -> None:
        """Promised was an upper bound: of the guesses beside the token due, some were not taken."""
        due = done.count + drafted
        if not 1 <= count <= due:
            raise ValueError(f"step {done.step}: {count} tokens for sequence {sequence.id}, 1 to {due} due")
        surplus = due - count
        sequence.promised -= surplus
        sequence.length -= surplus
        sequence.launched -= surplus

    def _commit_copy(self, copy: Copy, now: float) -> None:
        rank = self.ranks[copy.rank]
        sequence = rank.limbo[copy.sequence]
        self.events.append(Event(now, copy.lane, copy.sequence, copy.rank, f"{len(copy.source)} blocks"))
        if copy.lane == COPY_OUT:
            rank.copied_out(sequence)
        else:
            rank.copied_in(sequence)

    def check(self) -> None:
        """Every rank's law; for tests and idle moments."""
        for rank in self.ranks:
            rank.check()


def _prefix_hit(ranks: tuple[Rank, ...], prefix: Callable[[], tuple[Hashable, ...]], rank: int) -> int:
    """Tokens of a prompt with these keys that a rank has in its prefix cache."""
    return len(ranks[rank].pool.find(prefix())) * ranks[rank].spec.block_size


def _state(victim: Preempted) -> str:
    """What a reader of the trace wants to know of a victim."""
    sequence = victim.sequence
    return f"returned={sequence.returned} freed={victim.freed}"


def _with_blocks(flight: Flight) -> Step:
    """The step with the blocks that its repetitions took."""
    blocks = list(flight.step.columns.blocks)
    for place, taken in flight.blocks.items():
        blocks[place] += tuple(taken)
    return flight.step.with_blocks(tuple(blocks))


def _block_crossings(turns: list[list[Sequence]], ticks: list[int], size: int) -> list[tuple[int, int, int]]:
    """(when, turn, place) of every block that `ticks` more decodes of the sequences of each turn need.

    In the order in which stepping takes them: last came the last tick of the last turn, before it that of the turn
    before, and so on. A sequence with `launched` tokens of KV computes positions launched .. launched + ticks - 1.
    """
    crossings: list[tuple[int, int, int]] = []
    for turn, (sequences, count) in enumerate(zip(turns, ticks, strict=True)):
        for place, sequence in enumerate(sequences):
            first = len(sequence.blocks) * size - sequence.launched
            if first < count:
                crossings += [((tick - count) * len(turns) + turn, turn, place) for tick in range(first, count, size)]
    crossings.sort()
    return crossings


def _blocks_after(sequences: list[Sequence], ticks: int, size: int) -> int:
    """Blocks that `ticks` more decodes of each sequence need beyond those it has."""
    return sum(max(-(-(s.launched + ticks) // size) - len(s.blocks), 0) for s in sequences)


def _ticks_that_fit(sequences: list[Sequence], most: int, free: int, size: int) -> int:
    """The largest number of decodes of each sequence, up to `most`, that the free blocks allow."""
    if len(sequences) * (most // size + 1) <= free or _blocks_after(sequences, most, size) <= free:
        return most
    return bisect_right(range(most + 1), free, key=lambda ticks: _blocks_after(sequences, ticks, size)) - 1
