"""The CUDA backend's queue, clock and failures, on a device that is the host."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.cuda.forward import Shape, least_shape, pack
from engine.cuda.memory import fitting_blocks
from engine.cuda.residents import Batch, Resident, Rows
from engine.cuda.state import Picking, SlotState
from engine.cuda.swap import _runs
from engine.cuda.timeline import REBASE, Clock
from engine.errors import EngineError, StepFailed
from engine.load import load_model
from engine.tiny import tiny
from playground.core import COPY_OUT, MAIN, Copy, Request, Sampling, Slice, Spec, Step
from playground.graphs import PREFILL_SIZES, decode_sizes, mixed_sizes
from tests.engine.cuda_host import HostMark, HostTimeline, load_on_host

PROMPT = (5, 6, 7, 8, 9)


def request(id=0, max_tokens=4, **more):
    more.setdefault("sampling", Sampling(ignore_eos=True))
    return Request(id, 0.0, len(PROMPT), max_tokens, prompt=PROMPT, **more)


def prefill(id, step=0, blocks=(0,), **more):
    return Step(step, 0, 0.0, (Slice(id, 0, 0, 0, len(PROMPT), True, blocks),), starts=(request(id, **more),))


def decode(id, step, start, blocks=()):
    return Step(step, 0, 0.0, (Slice(id, 0, 0, start, 1, True, blocks),))


@pytest.fixture(scope="module")
def model():
    return load_on_host(tiny("llama"))


@pytest.fixture
def backend(model):
    backend = CudaBackend(
        model, blocks=16, host_blocks=4, max_seqs=4, max_tokens=64, max_length=64, timeline=HostTimeline()
    )
    backend.now()
    yield backend
    backend.close()


@pytest.fixture
def timeline(backend):
    return backend._timeline


def test_one_step(backend):
    backend.launch(prefill(0))
    done = backend.wait()
    assert (done.step, done.lane, done.ended) == (0, MAIN, ())
    assert len(done.tokens[0]) == 1
    assert 0 <= done.launched <= done.started <= done.finished <= backend.now()
    assert 0 < done.host < done.finished - done.launched + 1e-3


def test_until_passes_before_a_completion(backend, timeline):
    timeline.hold = True
    backend.launch(prefill(0))
    until = backend.now() + 0.01
    assert backend.wait(until) is None
    assert backend.now() >= until
    timeline.let_go()
    assert backend.wait(until) is None  # complete, but later than that
    assert backend.wait(inf).finished > until


def test_copies_come_back_in_order_of_finish(backend, timeline):
    backend.launch(prefill(0))
    backend.wait()
    timeline.hold = True
    backend.launch(prefill(1, step=1, blocks=(1,)))
    backend.launch(Step(2, 0, 0.0, (), (Copy(0, 1, 0, (0,), (0,), COPY_OUT),)))
    computed, copied = timeline.held[1], timeline.held[3]
    timeline.held[:] = [*timeline.held[2:], *timeline.held[:2]]
    timeline.let_go()
    assert copied.time < computed.time
    assert [backend.wait().lane for _ in range(2)] == [COPY_OUT, MAIN]


def test_nothing_in_flight(backend):
    until = backend.now() + 0.02
    assert backend.wait(until) is None
    assert backend.now() >= until
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        backend.wait()


def test_a_failing_step_is_raised_with_its_id_and_stops_what_follows(backend):
    backend.launch(prefill(0))
    backend.launch(decode(0, 7, start=9))
    backend.launch(decode(0, 8, start=10))
    assert backend.wait().step == 0
    for _ in range(2):
        with pytest.raises(StepFailed, match="step 7 failed: sequence 0: position 9 has no token yet; 6 known"):
            backend.wait()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (prefill(0, blocks=()), "sequence 0: 5 tokens do not fit its 0 blocks of 16"),
        (prefill(0, blocks=tuple(range(5))), "sequence 0: 5 blocks are more than max_length allows"),
        (decode(3, 0, start=0), "sequence 3: no step has started it"),
        (Step(0, 0, 0.0, (), (Copy(0, 1, 0, (0,), (0,), COPY_OUT),)), "sequence 0: no step has started it"),
    ],
)
def test_what_cannot_be_is_an_error(backend, step, message):
    backend.launch(step)
    with pytest.raises(StepFailed, match=message):
        backend.wait()


def test_swapping_without_a_host_pool(model):
    backend = CudaBackend(model, blocks=16, max_seqs=2, max_tokens=64, max_length=64, timeline=HostTimeline())
    backend.launch(prefill(0))
    backend.launch(Step(1, 0, 0.0, (), (Copy(0, 1, 0, (0,), (0,), COPY_OUT),)))
    backend.wait()
    with pytest.raises(StepFailed, match=r"set kv\.host_blocks"):
        backend.wait()


def test_ends_are_forgotten_and_their_slots_used_again(backend):
    for step in range(20):
        backend.launch(prefill(step, step=2 * step))
        assert backend.wait().step == 2 * step
        backend.launch(Step(2 * step + 1, 0, 0.0, (), ends=(step,)))
    backend.launch(decode(19, 99, len(PROMPT)))
    with pytest.raises(StepFailed, match="or one has ended it"):
        backend.wait()


def test_slices_launched_after_the_end_bring_no_tokens(backend, timeline):
    timeline.hold = True
    backend.launch(prefill(0, output_length=2))
    for step in range(1, 4):
        backend.launch(decode(0, step, len(PROMPT) + step - 1))
    timeline.let_go()
    dones = [backend.wait() for _ in range(4)]
    assert [0 in done.tokens for done in dones] == [True, True, False, False]
    assert [done.ended for done in dones] == [(), (0,), (), ()]


def test_graphs_are_captured_at_the_start_and_drawing_ones_when_needed(backend, timeline):
    assert timeline.captured == len(decode_sizes(4)) + len(mixed_sizes(4)) * len(PREFILL_SIZES) == 3 + 4
    backend.launch(prefill(0, sampling=Sampling(temperature=1.0)))
    backend.launch(decode(0, 1, len(PROMPT)))
    assert timeline.captured == 9
    backend.launch(decode(0, 2, len(PROMPT) + 1))
    assert timeline.captured == 9


def test_sizes_of_graphs():
    assert decode_sizes(1) == (1,)
    assert decode_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(256)[-3:] == (240, 248, 256)
    assert decode_sizes(300)[-3:] == (256, 288, 300)
    assert mixed_sizes(3) == (8,)
    assert mixed_sizes(100) == (8, 32, 64, 104)
    for sizes in (decode_sizes, mixed_sizes):
        assert all(a < b for a, b in pairwise(sizes(1000)))


def batch(*lengths, starts=None, samples=None, slots=None):
    """Slices of so many tokens, whose sequences sit in these slots."""
    residents = [Resident(None, Picking.GREEDY, slot=slot) for slot in slots or range(len(lengths))]
    return Batch.of(Rows.of(residents), starts or (0,) * len(lengths), lengths, samples or (True,) * len(lengths))


def test_the_graph_of_a_batch(backend):
    graphs = backend._graphs
    assert graphs.shape(batch(1, 1, 1)) == Shape(4)
    assert graphs.shape(batch(1, 1, 1, 1, 1)) is None
    assert graphs.shape(batch(1, 7)) == Shape(8, 80, 16, 24)
    assert graphs.shape(batch(1, samples=(False,))) == Shape(8, 80, 16, 24)
    assert graphs.shape(batch(79, 1)) == Shape(8, 80, 16, 24)
    assert graphs.shape(batch(80)).tokens == 144  # one token at least is padding
    assert graphs.shape(batch(600)) is None
    assert graphs.shape(batch(*[2] * 17)) is None


def test_a_batch_in_numbers():
    """Two decodes and two prefills, one of which does not sample, in a shape with room."""
    state = SlotState(Spec(blocks=9, max_length=64), 4, torch.device("cpu"))
    parts = batch(3, 1, 2, 1, starts=(4, 9, 0, 5), samples=(True, True, False, True), slots=(3, 0, 2, 1))
    shape = Shape(decodes=4, tokens=7, slices=3, rows=5)
    packed, sampled = pack(parts, shape, state.scratch)
    token_slots, positions, slots, contexts, offsets, rows = np.split(packed, np.cumsum(shape.sizes)[:-1])
    assert token_slots.tolist() == [0, 1, 4, 4, 3, 3, 3, 2, 2, 4, 4]
    assert positions.tolist() == [9, 5, -1, -1, 4, 5, 6, 0, 1, -1, -1]
    assert slots.tolist() == [0, 1, 4, 4, 3, 2, 4]
    assert contexts.tolist() == [10, 6, 0, 0, 7, 2, 0]
    assert offsets.tolist() == [4, 7, 9, 9]
    assert rows.tolist() == [0, 1, 6, 10, 10]
    assert [resident.slot for resident in sampled.residents] == [0, 1, 3]
    assert sampled.positions == [10, 6, 7]
    assert least_shape(parts) == Shape(8, 5, 16, 3)
    assert least_shape(batch(1, 1)) == Shape(2)


def test_parcels_grow_and_are_used_again(backend):
    backend.launch(prefill(0))
    backend.wait()
    parcel = backend._parcels.take()
    parts = [np.arange(5), np.arange(100_000), np.empty(0, dtype=np.int64)]
    views = parcel.send(parts)
    assert [view.tolist() for view in views] == [part.tolist() for part in parts]
    assert (views[1].data_ptr() - views[0].data_ptr()) % 128 == 0


def test_runs():
    assert list(_runs([4, 5, 6, 9, 2, 3])) == [(0, 4, 3), (3, 9, 1), (4, 2, 2)]
    assert list(_runs([])) == []


def test_the_clock_keeps_within_what_the_host_knows():
    clock = Clock(HostTimeline())
    zero = clock._base.time
    now = clock.now()
    started, finished = clock.between(HostMark(zero + now), HostMark(zero + now + 100), earliest=0.0)
    assert finished <= clock.now()  # the device's clock runs ahead
    assert 99 < finished - started + 100 - finished < 101 or started < finished
    clock = Clock(HostTimeline())
    now = clock.now()
    started, finished = clock.between(HostMark(zero - 1), HostMark(zero - 0.5), earliest=now)
    assert now <= started <= finished <= clock.now()


def test_the_clock_changes_its_base():
    clock = Clock(HostTimeline())
    clock._origin -= 5 * REBASE
    zero = clock._base.time
    late = HostMark(zero + 2 * REBASE)
    clock.between(HostMark(zero + REBASE), late, earliest=0.0)
    assert clock._base is late


def test_spec(model):
    spec = CudaBackend(
        model,
        blocks=12,
        block_size=8,
        host_blocks=3,
        max_seqs=5,
        max_tokens=100,
        max_length=64,
        timeline=HostTimeline(),
    ).spec
    assert (spec.blocks, spec.block_size, spec.host_blocks) == (12, 8, 3)
    assert (spec.max_seqs, spec.max_tokens, spec.max_length) == (5, 100, 64)
    assert (spec.stages, spec.ranks, spec.forwards_tokens, spec.repeats) == (1, 1, True, False)


def test_blocks_that_fit():
    assert fitting_blocks(free=80, total=100, utilization=0.9, reserved=10, block=7) == 8
    with pytest.raises(EngineError, match=r"gpu_memory_utilization=0.5: .* raise it, lower limits.max_tokens"):
        fitting_blocks(free=80, total=100, utilization=0.5, reserved=25, block=7)
    with pytest.raises(EngineError, match=r"gpu_memory_utilization=1.5 must lie in \(0, 1\]"):
        fitting_blocks(free=80, total=100, utilization=1.5, reserved=0, block=7)


def test_close_twice(backend):
    backend.launch(prefill(0))
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.launch(prefill(1))


def test_no_device_is_told():
    with pytest.raises(EngineError, match="device=cuda: no CUDA device is visible"):
        CudaBackend(load_model(tiny("llama")), blocks=4)
