"""The backend on one NVIDIA GPU: steps are queued on streams as they are launched, and polled for.

It decides nothing. The host prepares a step while the device computes the ones before; what a step samples stays on
the device, where the next one finds it, and is read by the host when the step is done.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from time import perf_counter, sleep

import torch
from torch import Tensor

from engine.backend import longest_sequence, room_of
from engine.cuda.forward import ROWS, Forward, Picked
from engine.cuda.graphs import Graphs, largest_shape
from engine.cuda.memory import GRAPHS, Memory, fitting_blocks
from engine.cuda.parcel import Parcel, Parcels
from engine.cuda.passage import Arrivals, Inlet, Outlet
from engine.cuda.residents import Batch, Residents, Sampled, told, top_asked
from engine.cuda.returns import DEPTH, Returns
from engine.cuda.state import Picking, SlotState, Words
from engine.cuda.swap import Swap
from engine.cuda.timeline import Clock, CudaTimeline, Mark, Timeline
from engine.cuda.turns import packed, packed_together
from engine.cuda.warmup import WARM_SLICES, measured, run_idle
from engine.errors import EngineError, StepFailed
from engine.kv import KvPool, block_bytes
from engine.memory import enough_memory, is_shortage
from engine.models.decoder import Decoder
from engine.pooled import ALONE, Passes, Pooled
from engine.runner import in_order
from kernels import reference
from playground.core import COPY_IN, COPY_OUT, Copy, Done, Logprob, Spec, Step

PAUSE = 2e-5
"""Seconds between two looks at the device while it has more work than the step that is waited for."""

LEAVE_MORE = "lower kv.blocks, backend.gpu_memory_utilization or limits.max_tokens"

NAP = 0.01
"""Seconds between two looks at the clock while nothing is in flight."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A lane of a step that the device has been given."""

    step: int
    lane: str
    launched: float
    begun: Mark
    ended: Mark
    host: float
    order: int = 0
    """Of its batch, see `Residents.order`."""
    parcel: Parcel | None = None
    sampled: Sampled | None = None
    """Whose tokens the parcel brings back; None where none are sampled: copies, and stages before the last one."""
    shares: Tensor | None = None
    """The parcel's table of logprobs, if somebody asked."""


@dataclass(slots=True)
class Queue:
    """Flights that finish in the order of their launch."""

    flights: deque[Flight] = field(default_factory=deque)
    latest: float = 0.0
    """When the last one that came back had finished."""

    def passed(self) -> Iterator[Flight]:
        """Take out those that are complete."""
        while self.flights and self.flights[0].ended.query():
            yield self.flights.popleft()


class CudaBackend:
    """One rank on one GPU: a whole model, or a part of one.

    Of a pipeline's stages only the last one samples; the completions of others have no tokens. A stage was at work from
    when it had received until it had computed, and the next step's hidden states may be on their way meanwhile.

    `blocks` is the KV pool's size; None takes what `memory_utilization` of the device's memory leaves beside the
    weights, one step's activations and the graphs. `graphs`: small steps as captured CUDA graphs. Lanes of slices run
    one after another, copies beside them. The clock starts at the first `now()` or `launch`, when kernels have been
    compiled and graphs captured.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        blocks: int | None = None,
        block_size: int = 16,
        host_blocks: int = 0,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_length: int | None = None,
        graphs: bool = True,
        memory_utilization: float = 0.9,
        timeline: Timeline | None = None,
    ) -> None:
        self._model = model
        self._timeline = timeline or CudaTimeline(model.device)
        _check_kernels(model)
        self.spec = Spec(
            blocks=1 if blocks is None else blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_length=longest_sequence(model, max_length),
            forwards_tokens=model.part.forwards,
            **room_of(model),
        )
        with enough_memory(f"limits.max_seqs={max_seqs}: no GPU memory for the state of so many sequences; lower it"):
            self._state = SlotState(self.spec, 2 * max_seqs * model.part.stages, model.device)
        self._inlet, self._outlet = self._passages(graphs)
        self._returns, self._return = self._ways_back(graphs)
        self._timeline.synchronize()  # what was made on the default stream is there for the others
        self._activations = self._measure() if model.device.type == "cuda" else 0
        if blocks is None:
            self.spec = replace(self.spec, blocks=self._fitting(memory_utilization, GRAPHS if graphs else 0))
        spare = self.spec.spare_layers
        self._pool = KvPool(model.shape, self.spec.blocks, block_size, model.dtype, model.device, spare=spare)
        with enough_memory(f"kv.host_blocks={host_blocks}: no GPU memory left for swapping; {LEAVE_MORE}"):
            self._swap = Swap(self._pool, host_blocks, self._timeline.pinned) if host_blocks else None
        self._forward = self._forward_with(self._pool)
        fixed = model.part.exchange is None or model.part.exchange.fixed
        self._graphs = self._no_graphs() if graphs and fixed else None
        self._graph_bytes = 0
        self._parcels = Parcels(self._timeline, max(max_seqs, max_tokens))
        self._residents = Residents(
            self._state,
            model.shape.vocabulary,
            model.config.eos,
            embeds=model.part.first,
            picks=model.part.last,
            forwards=model.part.forwards,
        )
        self._computing, self._copying = Queue(), Queue()
        self._ready: list[tuple[float, int, Done]] = []
        self._landed = count()
        self._failure: StepFailed | None = None
        self._clock: Clock | None = None
        self._closed = False
        self._timeline.synchronize()

    def start(self) -> None:
        """Compile kernels, capture graphs and set the clock to 0. Not while steps are in flight."""
        most = max(min(self.spec.max_seqs, self.spec.max_tokens // 2), 1)
        with enough_memory(f"backend: no GPU memory left for a step; {LEAVE_MORE}"), self._timeline.computing():
            for slices in (size for size in WARM_SLICES if size <= most):
                run_idle(self._forward, self._state, slices, 2, 1, self._model.device)
        if self._graphs is not None:
            before = _reserved(self._model.device)
            with enough_memory(f"backend: no GPU memory left for graphs; {LEAVE_MORE}, or backend.cuda_graphs=false"):
                self._graphs.capture_all(Picking.GREEDY)
            self._graph_bytes = _reserved(self._model.device) - before
        # What was made so far stays: a collection that walks all of torch takes longer than a step.
        gc.collect()
        gc.freeze()
        self._clock = Clock(self._timeline)

    @property
    def memory(self) -> Memory:
        """What the device's memory is used for; graphs count once they are captured."""
        weights = self._model.shape.parameters * self._model.dtype.itemsize
        host = self._swap.host_bytes if self._swap else 0
        return Memory(weights, self._state.bytes, self._activations, self._pool.data.nbytes, self._graph_bytes, host)

    def now(self) -> float:
        """Seconds since the run began; the first call begins it."""
        return self._time.now()

    @property
    def _time(self) -> Clock:
        if self._clock is None:
            self.start()
        assert self._clock is not None
        return self._clock

    # --- launching

    @torch.inference_mode()
    def launch(self, step: Step, pooled: Pooled = ALONE) -> None:
        """Prepare a step and queue it on the device; of a step that others take part in, all lanes come back."""
        launched = self.now()
        if self._closed:
            raise RuntimeError("launch: the backend is closed")
        if self._failure is not None:
            return  # what an earlier step did not compute, this one would build upon
        try:
            if step.move is not None:
                self._move_layers(step.move.layers)
            self._residents.start(step.starts)
            for lane in in_order(pooled) if pooled else step.lanes:
                self._launch(step, lane, pooled.get(lane, ()), launched)
            self._residents.end(step.ends)
        except (ValueError, RuntimeError) as error:
            self._fail(step.id, error)

    def learn(self, tokens: Iterable[tuple[int, int, int]]) -> None:
        """Sequence, position and token, as another stage sampled it; before the step that computes it."""
        for token in tokens:
            self._residents.learn(*token)

    def _move_layers(self, layers: tuple[int, ...]) -> None:
        """With nothing under way. Graphs know where weights and blocks were: others are captured as steps want them."""
        if (mover := self._model.part.mover) is None:
            return
        self._timeline.synchronize()
        others = [] if self._swap is None else [self._swap.layers]
        with self._timeline.computing():
            moved = mover.move(layers, self._model, self._pool, *others)
        self._timeline.synchronize()
        if moved and self._graphs is not None:
            self._graphs = self._no_graphs()
            if self._replicas > 1:  # captures exchange: the others must be at it, too
                self._graphs.capture_all(Picking.GREEDY)

    def _no_graphs(self) -> Graphs:
        """None captured so far."""
        return Graphs(self._forward, self.spec.max_seqs, self._state.scratch, self._timeline, replicas=self._replicas)

    @property
    def _replicas(self) -> int:
        """That bring tokens to this rank's experts."""
        return 1 if self._model.part.exchange is None else self._model.part.exchange.replicas

    def _launch(self, step: Step, lane: str, pooled: Passes, launched: float) -> None:
        if lane in (COPY_IN, COPY_OUT):
            self._copy(step, lane, launched)
        else:
            self._compute(step, lane, pooled, launched)

    def _compute(self, step: Step, lane: str, pooled: Passes, launched: float) -> None:
        began = perf_counter()
        slices, scratch, overlap = step.columns_of(lane), self._state.scratch, self._model.part.overlap
        batch = self._residents.place(slices) if slices.sequence else Batch.empty()
        picking = batch.rows.picking
        top = top_asked(batch.rows.residents) if Picking.LOGPROBS in picking else 0
        if pooled:
            numbers, shape, sampled, known, graph = packed_together(
                batch, self._graphs, overlap.threshold, scratch, pooled
            )
        else:
            numbers, shape, sampled, known, graph = packed(batch, self._graphs, overlap, scratch)
        if graph is not None and self._graphs is not None:
            self._graphs.capture(graph, picking)
        extra = self._residents.recount(sampled) if Picking.PENALTIES in picking else self._called(batch)
        parcel = self._parcels.take()
        with self._timeline.computing():
            if self._inlet is not None:
                self._inlet.receive(shape.all_tokens)
            sent, begun = self._send(parcel, numbers, extra)
            if graph is None or self._graphs is None:
                found = self._forward(sent, shape, picking, top, known)
            else:
                found = self._graphs.run(sent, graph, picking, top)
            answered, shares = self._bring_back(found, sampled, parcel)
            ended = self._timeline.mark()
            if self._outlet is not None and isinstance(found, Tensor):
                self._outlet.send(found)
            if self._return is not None and isinstance(found, Picked) and shape.wanted:
                self._return.send(found.ids[:, None])
        if self._returns is not None:
            # Last of all: loading a kernel waits for what runs, and this runs until the others have done the step.
            self._returns.expect(self._residents.order, sampled, shape.wanted)
        host = perf_counter() - began
        self._computing.flights.append(
            Flight(step.id, lane, launched, begun, ended, host, self._residents.order, parcel, answered, shares)
        )

    def _bring_back(
        self, found: Picked | Tensor, sampled: Sampled, parcel: Parcel
    ) -> tuple[Sampled | None, Tensor | None]:
        """Have sampled tokens come to the host, with logprobs if somebody asked; whose they are, and the logprobs."""
        if not isinstance(found, Picked):
            return None, None
        count = len(sampled.positions)
        parcel.answers[:count].copy_(found.ids[:count], non_blocking=True)
        return sampled, None if found.logprobs is None else parcel.fetch(found.logprobs[:count])

    def _called(self, batch: Batch) -> Sequence[Words]:
        """Tokens of the last stage that a batch needs, see `Returns.call`."""
        if self._returns is None:
            return ()
        return self._returns.call(self._residents.promise(batch), self._residents.order)

    def _send(self, parcel: Parcel, numbers: Words, extra: Sequence[Words]) -> tuple[Tensor, Mark]:
        """Upload a batch with what else is new, and bring the state up to date.

        `extra`: of the first stage of many as `_called` gives it, of others as `recount`.
        """
        packed, places, words, *more = parcel.send([numbers, *self._residents.news(), *extra])
        if self._returns is not None:
            self._returns.store(more)
        begun = self._timeline.mark()
        if len(places):
            self._state.write(places, words)
        if more and self._returns is None:
            self._state.make_counts(self._model.shape.vocabulary)
            self._state.write_counts(*more)
        return packed, begun

    def _copy(self, step: Step, lane: str, launched: float) -> None:
        began = perf_counter()
        with self._timeline.copying():
            begun = self._timeline.mark()
            for copy in step.copies:
                if copy.lane == lane:
                    self._move(copy)
            ended = self._timeline.mark()
        self._copying.flights.append(Flight(step.id, lane, launched, begun, ended, perf_counter() - began))

    def _move(self, copy: Copy) -> None:
        if self._swap is None:
            raise EngineError("kv.host_blocks=0: there is no host pool to swap with; set kv.host_blocks")
        self._residents.move(copy)
        move = self._swap.out if copy.lane == COPY_OUT else self._swap.back
        move(copy.source, copy.target)

    def _fail(self, step: int, error: Exception) -> None:
        unexplained = is_shortage(error) and not isinstance(error, EngineError)
        why = f"no GPU memory left; {LEAVE_MORE}" if unexplained else error
        self._failure = StepFailed(f"step {step} failed: {why}")
        self._failure.__cause__ = error

    # --- waiting

    def wait(self, until: float = inf) -> Done | None:
        """The next completion in order of finish; None once `until` has passed without one.

        A step that failed makes this raise `StepFailed` with the step's id, once those before it have come back, and
        ever after.
        """
        time = self._time
        while True:
            now = time.now()
            self._collect()
            if self._ready and self._ready[0][0] <= until:
                return heappop(self._ready)[2]
            in_flight = len(self._computing.flights) + len(self._copying.flights)
            if self._failure is not None and not in_flight:
                raise self._failure
            if not in_flight and until == inf:
                raise RuntimeError("wait: nothing is in flight and no time was given to wait for")
            if now >= until:
                return None
            self._pause(until - now)

    def close(self) -> None:
        """Wait for the device and give its memory back; steps in flight are dropped."""
        if self._closed:
            return
        self._closed = True
        gc.unfreeze()
        self._timeline.synchronize()
        self._computing.flights.clear()
        self._copying.flights.clear()
        del self._graphs, self._forward, self._pool, self._swap, self._state, self._parcels, self._inlet, self._outlet
        self._timeline.release()

    def _pause(self, left: float) -> None:
        """Spin only while somebody waits for the one step that the device has."""
        computing, copying = len(self._computing.flights), len(self._copying.flights)
        if not computing and not copying:
            sleep(min(left, NAP))
        elif computing != 1:
            sleep(min(left, PAUSE))

    def _collect(self) -> None:
        """Note everything that is complete."""
        queues = (self._computing, self._copying)
        try:
            found = [(queue, flight) for queue in queues for flight in queue.passed()]
            if found:  # a look takes time: what was not complete then may yet have been earlier than what was
                found += [(queue, flight) for queue in queues for flight in queue.passed()]
        except RuntimeError as error:
            first = min((queue.flights[0].step for queue in queues if queue.flights), default=-1)
            self._fail(first, error)
            for queue in queues:
                queue.flights.clear()
            return
        for queue, flight in found:
            done = self._land(queue, flight)
            heappush(self._ready, (done.finished, next(self._landed), done))

    def _land(self, queue: Queue, flight: Flight) -> Done:
        started, finished = self._time.between(flight.begun, flight.ended, flight.launched)
        finished = queue.latest = max(finished, queue.latest)
        tokens: dict[int, tuple[int, ...]] = {}
        ended: tuple[int, ...] = ()
        logprobs: dict[int, tuple[Logprob, ...]] = {}
        if flight.parcel is not None:
            self._residents.completed = flight.order
            if flight.sampled is not None:
                answers = flight.parcel.answers[: len(flight.sampled.positions)].tolist()
                tokens, ended = self._residents.take_back(flight.sampled, answers)
                if flight.shares is not None:
                    logprobs = told(flight.sampled, flight.shares.tolist(), tokens)
            self._parcels.give_back(flight.parcel)
        return Done(
            flight.step, flight.lane, flight.launched, started, finished, tokens, ended, flight.host, logprobs=logprobs
        )

    # --- memory

    def _passages(self, graphs: bool) -> tuple[Inlet | None, Outlet | None]:
        """To the stages before and after, with room for the largest step."""
        model, spec = self._model, self.spec
        before, after = model.part.before, model.part.after
        if before is None and after is None:
            return None, None
        padding = ROWS * (2 if model.part.overlap.halves(spec.max_tokens) else 1)  # each half has its own
        tokens = max(spec.max_tokens + padding, largest_shape(spec.max_seqs).all_tokens if graphs else 0)
        with enough_memory(f"limits.max_tokens={spec.max_tokens}: no GPU memory to exchange so many; lower it"):
            like = torch.empty(tokens, model.shape.hidden, dtype=model.dtype, device=model.device)
            inlet = None if before is None else Inlet(before, like, self._timeline)
            return inlet, None if after is None else Outlet(after, like, self._timeline)

    def _ways_back(self, graphs: bool) -> tuple[Returns | None, Outlet | None]:
        """For sampled tokens: at the first stage of a pipeline that forwards them, and at the last."""
        part, most = self._model.part, self.spec.max_seqs
        if part.back is None:
            return None, None
        rows = max(most, largest_shape(most).wanted if graphs else 0)
        like = torch.empty(rows, 1, dtype=torch.int64, device=self._model.device)
        if part.first:
            return Returns(Arrivals(part.back, like, self._timeline, DEPTH), self._state), None
        return None, Outlet(part.back, like, self._timeline, DEPTH)

    def _forward_with(self, pool: KvPool) -> Forward:
        return Forward(self._model, self._state, pool, None if self._inlet is None else self._inlet.hidden)

    def _measure(self) -> int:
        """Bytes of one step's activations, by a step for nobody."""
        model, spec = self._model, self.spec
        forward = self._forward_with(KvPool(model.shape, 1, spec.block_size, model.dtype, model.device))
        with self._timeline.computing():
            return measured(forward, self._state, spec.max_tokens, spec.max_length, spec.max_seqs, model.device)

    def _fitting(self, utilization: float, reserved: int) -> int:
        """Blocks that fit, and no more than could ever be used."""
        spec, model = self.spec, self._model
        block = block_bytes(model.shape, spec.block_size, model.dtype, spec.spare_layers)
        reserved += spec.spare_layers * model.layer_bytes
        free, total = torch.cuda.mem_get_info(self._model.device)
        return min(
            fitting_blocks(free, total, utilization, reserved, block), spec.max_seqs * spec.blocks_for(spec.max_length)
        )


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _check_kernels(model: Decoder) -> None:
    """The reference asks the host for lengths and knows no padding: it cannot be part of a graph."""
    shape = model.shape
    place = "place_qkv" if shape.latent is None else "place_latent"
    if getattr(model.ops, place) is getattr(reference, place):
        raise EngineError(f"kernels.{place}=reference: it knows no padding, which steps on a GPU have; take triton")
    if shape.latent is not None and model.ops.mla_attention is reference.MlaAttention:
        raise EngineError("kernels.mla_attention=reference: it asks the host for lengths; take triton")
    if model.ops.attention is reference.Attention:
        raise EngineError(
            f"kernels.attention: no implementation for a GPU takes {model.dtype}, {shape.heads} query heads over "
            f"{shape.kv_heads} KV heads of {shape.head_dim}; see python -m kernels list"
        )
