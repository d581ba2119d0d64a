"""Carries out steps: inputs from slices, one forward pass a rank and lane, tokens from logits, blocks from copies.

It decides nothing and knows no clock. Steps must come in the order they were launched: a slice may need a token that
the step before it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import EngineError
from engine.kv import KvPool, copy_blocks
from engine.models.decoder import Decoder, Inputs
from engine.overlap import halved, passes
from engine.pooled import Passes
from engine.returns import Returns
from engine.sampler import Row, pick
from engine.sequence import Ints, Sequence
from kernels.batch import PagedBatch
from playground.core import COPY_IN, COPY_OUT, Copy, Logprob, Request, Slice, Step


class Outcome(NamedTuple):
    """What a lane of a step brought, as in `Done`: tokens of each sequence that sampled, and those that ended."""

    tokens: dict[int, tuple[int, ...]]
    ended: tuple[int, ...]
    logprobs: dict[int, tuple[Logprob, ...]]


class Pools(NamedTuple):
    """One rank's KV: on its device, and on the host if it may swap."""

    device: KvPool
    host: KvPool | None = None


class Work(NamedTuple):
    """A slice and the sequence it belongs to."""

    part: Slice
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a lane, ready to run. `sampled`: whose tokens the rows of logits are, in order."""

    rank: int
    inputs: tuple[Inputs, ...]
    """Of one pass, or of the two by turns."""
    sampled: list[Row]


Job = Callable[[], Outcome]
"""A lane's work with its inputs prepared: running it takes the device's time and nothing else."""


def in_order(lanes: Iterable[str]) -> tuple[str, ...]:
    """Lanes in the order they run: copies first, since what they bring may be wanted by a slice."""
    return tuple(sorted(lanes, key=lambda lane: ORDER.get(lane, len(ORDER))))


ORDER = {COPY_OUT: 0, COPY_IN: 1}


class Runner:
    """The sequences of one group and the KV pools of its ranks."""

    def __init__(self, model: Decoder, pools: Mapping[int, Pools]) -> None:
        self._model = model
        self._pools = pools
        self._sequences: dict[int, Sequence] = {}
        part = model.part
        self._returns = Returns(part.back, model.config.eos) if part.back is not None and part.first else None

    def begin(self, step: Step) -> None:
        """Move layers, and get to know the requests that a step starts. Call before the step's lanes."""
        if step.move is not None:
            self._move_layers(step.move.layers)
        for request in step.starts:
            self._sequences[request.id] = Sequence(request, self._model.shape.vocabulary)

    def call(self, step: Step, lane: str) -> None:
        """Wait for the tokens that a lane's slices need, if another stage samples them. Call before `prepare`."""
        if self._returns is None:
            return
        ends: dict[Sequence, int] = {}
        for part in step.slices:
            if part.lane == lane:
                sequence = self._sequence(part.sequence)
                ends[sequence] = max(ends.get(sequence, 0), part.start + part.length)
        self._returns.call(ends)

    @torch.inference_mode()
    def prepare(self, step: Step, lane: str, pooled: Passes = ()) -> Job:
        """Everything of a lane that the host does; `pooled`: tokens of all replicas that compute it together."""
        copies = [copy for copy in step.copies if copy.lane == lane]
        ranks: dict[int, list[Slice]] = {}
        for part in step.slices:
            if part.lane == lane:
                ranks.setdefault(part.rank, []).append(part)
        for copy in copies:
            self._move_table(copy)
        batches = [self._batch(rank, slices, pooled) for rank, slices in ranks.items()]
        if pooled and not batches:
            batches = [self._batch(0, [], pooled)]
        return lambda: self._run(copies, batches)

    def end(self, step: Step) -> None:
        """Forget the sequences that no later step names. Call after the step's lanes."""
        for id in step.ends:
            self._sequences.pop(id, None)

    def warm_up(self, request: Request) -> None:
        """Compute a request's prompt in the first blocks of every rank, for nothing but the time it takes.

        Only while no sequence lives: it overwrites those blocks.
        """
        for rank, pools in self._pools.items():
            blocks = tuple(range(-(-request.prompt_length // pools.device.block_size)))
            part = Slice(request.id, 0, rank, 0, request.prompt_length, True, blocks)
            step = Step(0, 0, 0.0, (part,), starts=(request,), ends=(request.id,))
            self.begin(step)
            self.prepare(step, part.lane)()
            self.end(step)

    # --- slices

    def _batch(self, rank: int, slices: list[Slice], pooled: Passes) -> Batch:
        size = self._pools[rank].device.block_size
        for part in slices:
            self._place(part, size)
        works = [self._work(some) for some in self._passes(slices, pooled)]
        sampled = [Row(sequence, part.start + part.length) for work in works for part, sequence in work if part.samples]
        inputs = [self._inputs(work, size) if work else self._nothing() for work in works]
        counts = pooled or ((),) * len(works)
        if self._returns is not None:
            self._returns.expect(sampled)
        return Batch(
            rank, tuple([replace(one, pooled=count) for one, count in zip(inputs, counts, strict=True)]), sampled
        )

    def _passes(self, slices: list[Slice], pooled: Passes) -> Seq[list[Slice]]:
        """All at once or in halves: as this rank's slices have it, or all ranks' together."""
        overlap = self._model.part.overlap
        if not pooled:
            return [only for (only,) in passes([slices], overlap)]
        return halved(slices, overlap.threshold) if len(pooled) > 1 else [slices]

    def _work(self, slices: list[Slice]) -> list[Work]:
        """Alike slices side by side: attention pads neighbours to one size."""
        ordered = sorted(slices, key=lambda part: (part.length, part.start, part.sequence))
        return [Work(part, self._sequence(part.sequence)) for part in ordered]

    def _place(self, part: Slice, block_size: int) -> None:
        """Take in a slice's blocks. Where its inputs or blocks do not exist it would compute garbage in silence.

        A stage in the middle knows no token that was sampled, and needs none.
        """
        sequence, end = self._sequence(part.sequence), part.start + part.length
        sequence.place(part.epoch, part.blocks)
        if end > sequence.known and (self._model.part.first or self._model.part.last):
            raise EngineError(f"sequence {part.sequence}: position {end - 1} has no token yet; {sequence.known} known")
        if end > len(sequence.table) * block_size:
            raise EngineError(
                f"sequence {part.sequence}: {end} tokens do not fit its {len(sequence.table)} blocks of {block_size}"
            )

    def _inputs(self, work: list[Work], block_size: int) -> Inputs:
        starts = [part.start for part, _ in work]
        lengths = [part.length for part, _ in work]
        tokens = [sequence.tokens[part.start : part.start + part.length] for part, sequence in work]
        ends = np.cumsum(lengths)
        rows = np.repeat(np.arange(len(work)), lengths)
        positions = np.arange(ends[-1]) + np.repeat(np.array(starts) - (ends - lengths), lengths)
        tables = _padded([sequence.table.ids for _, sequence in work])
        slots = tables[rows, positions // block_size] * block_size + positions % block_size
        sampled = ends[[part.samples for part, _ in work]] - 1
        device = self._model.device

        def moved(values: Ints) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return Inputs(
            tokens=moved(np.concatenate(tokens)),
            positions=moved(positions),
            slots=moved(slots),
            rows=moved(sampled),
            pages=PagedBatch(starts, lengths, moved(tables), block_size),
        )

    def _nothing(self) -> Inputs:
        """No tokens: others' want this rank's experts."""
        none = torch.empty(0, dtype=torch.int64, device=self._model.device)
        return Inputs(none, none, none, none, PagedBatch([], [], none[None], 1))

    @torch.inference_mode()
    def _run(self, copies: list[Copy], batches: list[Batch]) -> Outcome:
        for copy in copies:
            self._copy(copy)
        ended: list[int] = []
        outcome = Outcome({}, (), {})
        for batch in batches:
            self._forward(batch, outcome, ended)
        return outcome._replace(ended=tuple(ended))

    def _forward(self, batch: Batch, outcome: Outcome, ended: list[int]) -> None:
        first, *later = batch.inputs
        logits = self._model(first, self._pools[batch.rank].device, *later)
        if not self._model.part.last:
            return  # another stage samples
        picked = pick(logits, batch.sampled, self._model.ops)
        if self._model.part.back is not None and picked.ids:
            self._model.part.back.send(torch.tensor(picked.ids))
        for index, ((sequence, position), token) in enumerate(zip(batch.sampled, picked.ids, strict=True)):
            if not sequence.accept(position, token, self._model.config.eos):
                continue  # launched before anybody knew that the sequence had ended
            id = sequence.request.id
            outcome.tokens[id] = (token,)
            if index in picked.logprobs:
                outcome.logprobs[id] = (picked.logprobs[index],)
            if sequence.end is not None:
                ended.append(id)

    # --- copies and moves

    def _move_layers(self, layers: tuple[int, ...]) -> None:
        """To where the step wants them; a model that is whole has all of them, wherever they are said to be."""
        if (mover := self._model.part.mover) is None:
            return
        for device, host in self._pools.values():
            mover.move(layers, self._model, device, *[] if host is None else [host.data])

    def _move_table(self, copy: Copy) -> None:
        """From now on the sequence's blocks are the target's; on the host it has none that a slice could use."""
        blocks = copy.target if copy.lane == COPY_IN else ()
        sequence = self._sequence(copy.sequence)
        sequence.table.clear()
        sequence.table.extend(blocks)
        sequence.epoch = copy.epoch

    def _copy(self, copy: Copy) -> None:
        device, host = self._pools[copy.rank]
        if host is None:
            raise EngineError("kv.host_blocks=0: there is no host pool to swap with; set kv.host_blocks")
        source, target = (device, host) if copy.lane == COPY_OUT else (host, device)
        copy_blocks(source, target, (copy.source, copy.target))

    def _sequence(self, id: int) -> Sequence:
        sequence = self._sequences.get(id)
        if sequence is None:
            raise EngineError(f"sequence {id}: no step has started it, or one has ended it")
        return sequence


def _padded(tables: list[Ints]) -> Ints:
    """Block tables under one another, [slices, longest]; block 0 fills the ends."""
    padded = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
