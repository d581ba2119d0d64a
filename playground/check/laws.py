"""A recorder that watches a run and fails at the first law that is broken.

It believes nothing but what a backend is told: block tables are rebuilt from the slices and copies alone, and a shadow
of every KV pool says which token lies where.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from playground.core import COPY_IN, COPY_OUT, Copy, Done, Request, Slice, Spec, Step
from playground.scheduler import Ended, Event, Group, Scheduler

ENDLESS = 5000
"""Steps that no run of a few hundred tokens needs."""


class Broken(AssertionError):
    """A law that does not hold. `law`: the name of the property it belongs to."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(what)
        self.law = law


def hold(law: str, condition: object, what: str) -> None:
    """Unlike `assert`, in force under `python -O`, too."""
    if not condition:
        raise Broken(law, what)


@dataclass
class Table:
    """A sequence's KV on one rank, as its backend knows it."""

    epoch: int
    blocks: list[int]
    tokens: int = 0
    """Positions that have been asked for."""


@dataclass
class Cell:
    """One token's place in a block: which token, and whether the slice that computed it has committed."""

    token: object = None
    known: bool = False


class Laws:
    """Checks while the run goes on; `finish` checks what must hold at its end."""

    def __init__(self, spec: Spec, scheduler: Scheduler, endless: int = ENDLESS) -> None:
        self.spec = spec
        self.endless = endless
        self.scheduler = scheduler
        self.steps: list[Step] = []
        self.dones: list[Done] = []
        self.committed_steps: list[Step] = []
        self.events: list[Event] = []
        self.outcomes: dict[int, Ended] = {}
        self.tokens: dict[int, int] = defaultdict(int)
        self._arrived: set[int] = set()
        self._flights: dict[int, tuple[Step, set[str]]] = {}
        self._requests: dict[tuple[int, int], Request] = {}  # by (group, sequence)
        self._all: dict[int, Request] = {}
        self._tables: dict[int, Table] = {}
        self._device: dict[tuple[int, int], list[Cell]] = defaultdict(self._block)
        self._host: dict[tuple[int, int], list[Cell]] = defaultdict(self._block)
        self._ordinals: dict[int, int] = defaultdict(int)
        self._sampled_in: dict[tuple[int, int], int] = {}  # (sequence, position) -> ordinal of the step that samples it
        self._computed: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def _block(self) -> list[Cell]:
        return [Cell() for _ in range(self.spec.block_size)]

    # --- what the loop says

    def arrived(self, request: Request) -> None:
        hold("ends", request.id not in self._arrived, f"request {request.id} arrived twice")
        self._arrived.add(request.id)
        self._all[request.id] = request

    def looked(self, now: float, commits: int) -> None:
        hold("ends", commits == len(self.dones), f"{commits} completions counted, {len(self.dones)} came")

    def waits(self) -> None: ...

    def launched(self, step: Step, group: Group) -> None:
        self.scheduler.check()
        self.steps.append(step)
        hold("ends", len(self.steps) < self.endless, "no end in sight: the same tokens are computed again and again")
        self._ordinals[step.group] += 1
        for id in step.ends:
            hold("tokens", self._requests.pop((step.group, id), None), f"sequence {id} ended, but never started here")
        for request in step.starts:
            hold("tokens", (step.group, request.id) not in self._requests, f"request {request.id} started twice")
            self._requests[step.group, request.id] = request
        self._check_limits(step)
        for part in step.slices:
            self._check_slice(part, step)
        for copy in step.copies:
            self._check_copy(copy)
        self._flights[step.id] = (step, set(step.lanes))
        hold(
            "limits",
            sum(flying.group == step.group for flying, _ in self._flights.values()) <= self.scheduler.limit,
            f"more than {self.scheduler.limit} steps in flight",
        )

    def committed(self, done: Done, step: Step) -> None:
        self.scheduler.check()
        self.dones.append(done)
        self.committed_steps.append(step)
        hold("tokens", step.planned <= done.launched <= done.started <= done.finished, "time runs backwards")
        launched, lanes = self._flights[step.id]
        lanes.remove(done.lane)
        if not lanes:
            del self._flights[step.id]
        self._check_ticks(launched, step, done)
        for part in step.slices:
            if part.lane == done.lane:
                self._commit(part, step, done)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    def ended(self, ended: Ended) -> None:
        id = ended.request.id
        hold("ends", id not in self.outcomes, f"request {id} ended twice")
        self.outcomes[id] = ended

    # --- a step

    def _check_limits(self, step: Step) -> None:
        for rank in self.scheduler.groups[step.group].ranks:
            own = [part for part in step.slices if part.rank == rank.index]
            hold(
                "limits",
                sum(part.length for part in own) <= self.spec.max_tokens,
                f"step {step.id}: more than max_tokens={self.spec.max_tokens} on rank {rank.index}",
            )
            hold(
                "limits",
                len(rank.running) <= self.spec.max_seqs,
                f"step {step.id}: more than max_seqs={self.spec.max_seqs} on rank {rank.index}",
            )
            idle = self.spec.lockstep and bool(step.slices) and not own
            hold("limits", (rank.index in step.dummies) == idle, f"step {step.id}: dummies={step.dummies}")
        hold("limits", step.slices or step.copies, "a step of nothing")
        hold(
            "limits",
            step.repeat >= 1 and (self.spec.repeats or step.repeat == 1),
            f"step {step.id}: repeat={step.repeat}",
        )

    def _check_slice(self, part: Slice, step: Step) -> None:
        request = self._requests.get((step.group, part.sequence))
        if request is None:
            raise Broken("tokens", f"sequence {part.sequence} is unknown to its backend")
        hold("tokens", request.id not in self.outcomes, f"sequence {request.id} goes on after its end")
        hold(
            "tokens",
            request.id in self._arrived and request.arrival <= step.planned,
            f"request {request.id} was served before it arrived",
        )
        table = self._table_of(part, request)
        hold("tokens", part.start == table.tokens, f"sequence {request.id}: positions are not contiguous")
        hold("tokens", part.length >= 1, f"sequence {request.id}: an empty slice")
        table.tokens += part.length
        hold("tokens", len(table.blocks) >= self.spec.blocks_for(table.tokens), "KV without blocks")
        self._check_input_is_known(part, request, step)
        self._write(part, request, table)
        self._check_kv(part, request, table)
        for position in range(part.start, table.tokens):
            self._computed[request.id][position] += 1

    def _table_of(self, part: Slice, request: Request) -> Table:
        table = self._tables.get(part.sequence)
        if table and table.epoch == part.epoch:
            table.blocks.extend(part.blocks)
            return table
        hold("tokens", table is None or part.epoch > table.epoch, "an epoch came back")
        table = self._tables[part.sequence] = Table(part.epoch, list(part.blocks), part.start)
        # What the prefix cache gave: whole blocks, computed and known to be.
        hold("tokens", part.start % self.spec.block_size == 0, f"sequence {request.id}: half a block was shared")
        for position in range(part.start):
            cell = self._cell(part.rank, table, position)
            if cell.token != identity(request, position):
                raise Broken("tokens", f"sequence {request.id}: a wrong prefix")
            if not cell.known:
                raise Broken("tokens", f"sequence {request.id}: a prefix was shared before its slice committed")
        return table

    def _cell(self, rank: int, table: Table, position: int) -> Cell:
        block, offset = divmod(position, self.spec.block_size)
        return self._device[rank, table.blocks[block]][offset]

    def _write(self, part: Slice, request: Request, table: Table) -> None:
        size = self.spec.block_size
        for position in range(part.start, part.start + part.length):
            block = table.blocks[position // size]
            if self._held_by_another(part.rank, block, part.sequence):
                raise Broken("blocks", f"block {block} is still in use")
            self._device[part.rank, block][position % size] = Cell(identity(request, position))

    def _held_by_another(self, rank: int, block: int, sequence: int) -> bool:
        """By a step in flight: freed too early."""
        for step, lanes in self._flights.values():
            for part in step.slices:
                if part.rank == rank and part.sequence != sequence and part.lane in lanes:
                    table = self._tables[part.sequence]
                    if table.epoch == part.epoch and block in table.blocks:
                        return True
            for copy in step.copies:
                on_device = copy.source if copy.lane == COPY_OUT else copy.target
                if copy.rank == rank and copy.lane in lanes and block in on_device:
                    return True
        return False

    def _check_kv(self, part: Slice, request: Request, table: Table) -> None:
        for position in range(table.tokens):
            token = self._cell(part.rank, table, position).token
            if token != identity(request, position):
                raise Broken("blocks", f"sequence {request.id}: position {position} holds {token}")

    def _check_input_is_known(self, part: Slice, request: Request, step: Step) -> None:
        ordinal = self._ordinals[step.group]
        for position in range(max(part.start, request.prompt_length), part.start + part.length):
            if position - request.prompt_length < self.tokens[request.id]:
                continue
            if not self.spec.forwards_tokens:
                raise Broken("tokens", f"sequence {request.id}: position {position} is not known yet")
            sampled = self._sampled_in[request.id, position]
            if ordinal - sampled < self.spec.stages:
                raise Broken("tokens", f"sequence {request.id}: position {position} stalls the pipeline")
        if part.samples:
            self._sampled_in[request.id, part.start + part.length] = ordinal
            produced = part.start + part.length - request.prompt_length + 1
            hold("tokens", 1 <= produced <= request.max_tokens, f"sequence {request.id} gets {produced} tokens")

    def _check_copy(self, copy: Copy) -> None:
        table = self._tables[copy.sequence]
        hold(
            "blocks",
            copy.epoch > table.epoch and len(copy.source) == len(copy.target),
            f"copy of sequence {copy.sequence}: its epoch or length",
        )
        hold("blocks", copy.lane in (COPY_OUT, COPY_IN), f"copy of sequence {copy.sequence}: lane {copy.lane}")
        to_host = copy.lane == COPY_OUT
        source, target = (self._device, self._host) if to_host else (self._host, self._device)
        if not to_host:
            for block in copy.target:
                hold(
                    "blocks",
                    not self._held_by_another(copy.rank, block, copy.sequence),
                    f"block {block} is still in use",
                )
        expected = table.blocks[: self.spec.blocks_for(table.tokens)]
        hold("blocks", list(copy.source) == expected, "not what the sequence has")
        for here, there in zip(copy.source, copy.target, strict=True):
            target[copy.rank, there] = [Cell(cell.token) for cell in source[copy.rank, here]]
        self._tables[copy.sequence] = Table(copy.epoch, list(copy.target), table.tokens)

    # --- a completion

    def _commit(self, part: Slice, step: Step, done: Done) -> None:
        request = self._requests.get((step.group, part.sequence))
        table = self._tables[part.sequence]
        if table.epoch == part.epoch:
            for position in range(part.start, part.start + part.length):
                self._cell(part.rank, table, position).known = True
        if part.samples and request and part.sequence not in self.outcomes:
            self.tokens[part.sequence] += len(done.tokens[part.sequence])
            hold(
                "tokens",
                self.tokens[part.sequence] <= request.max_tokens,
                f"request {request.id} got more than max_tokens={request.max_tokens}",
            )

    def _check_ticks(self, launched: Step, step: Step, done: Done) -> None:
        """Repetitions were recorded as if each had been a step."""
        hold("steady", 1 <= done.count <= launched.repeat, f"step {step.id} was done {done.count} times")
        if done.count == 1:
            hold("steady", step is launched, f"step {step.id} came back changed")
            return
        hold("steady", len(done.ticks) == done.count and done.ticks[-1] == done.finished, f"step {step.id}: its ticks")
        hold("steady", list(done.ticks) == sorted(done.ticks), f"step {step.id}: its ticks run backwards")
        for before, after in zip(launched.slices, step.slices, strict=True):
            hold("steady", after._replace(blocks=()) == before._replace(blocks=()), f"step {step.id} came back changed")
            hold("steady", after.blocks[: len(before.blocks)] == before.blocks, f"step {step.id}: its blocks changed")
            request = self._all[after.sequence]  # its backend may have been told of its end meanwhile
            table = self._tables[after.sequence]
            table.blocks.extend(after.blocks[len(before.blocks) :])
            for tick in range(1, done.count):
                position = after.start + tick
                hold("steady", table.tokens == position, f"sequence {request.id}: a repetition left a gap")
                table.tokens += 1
                self._write(after._replace(start=position), request, table)
                self._computed[request.id][position] += 1
            self._check_kv(after, request, table)

    # --- the end

    def finish(self, requests: Sequence[Request]) -> None:
        hold(
            "ends",
            not self.scheduler.live and not self._flights,
            "the run is over, and something is still in flight or waits",
        )
        self.scheduler.check()
        for rank in self.scheduler.ranks:
            hold("blocks", rank.pool.free == self.spec.blocks, "blocks were lost")
            hold("blocks", rank.host.free == self.spec.host_blocks, "host blocks were lost")
            hold(
                "blocks",
                not rank.live and rank.waiting_tokens == 0 and rank.freeing == 0,
                f"rank {rank.index} still counts work",
            )
        hold("ends", set(self.outcomes) == {request.id for request in requests}, "not every request ended")
        preempted = {event.sequence for event in self.events if event.kind in ("recompute", "swap")}
        for request in requests:
            self._check_outcome(request, self.outcomes[request.id])
            times = self._computed[request.id].values()
            if request.id not in preempted:
                hold("tokens", max(times, default=1) == 1, "a token was computed twice")
            if not request.hashes:
                again = sum(count - 1 for count in times)
                hold(
                    "tokens",
                    self.outcomes[request.id].sequence.recomputed == again,
                    f"request {request.id}: recomputed tokens miscounted",
                )

    def _check_outcome(self, request: Request, ended: Ended) -> None:
        if ended.outcome == "finished":
            expected = min(request.max_tokens, request.output_length or request.max_tokens)
            hold(
                "ends",
                ended.sequence.returned == self.tokens[request.id] == expected,
                f"request {request.id} got {self.tokens[request.id]} of {expected} tokens",
            )
            hold("ends", not ended.why, f"request {request.id} finished, and yet: {ended.why}")
        else:
            hold(
                "ends",
                ended.outcome in ("rejected", "aborted") and ended.why,
                f"request {request.id} was {ended.outcome} without a reason",
            )
        hold("ends", ended.finished >= request.arrival, f"request {request.id} ended before it arrived")


def identity(request: Request, position: int) -> object:
    """Which token a position holds: what hashes cover is equal where they are, everything else is the request's own."""
    if position < min(request.prompt_length, len(request.hashes) * request.hash_block):
        return request.hashes[position // request.hash_block], position
    return "own", request.id, position
