"""The backend's clock, queue and failures; what it computes is `test_correctness`'s subject."""

import threading
import time
from math import inf

import pytest

from engine.backend import TorchBackend
from engine.errors import EngineError, StepFailed
from playground.core import MAIN, Request, Sampling, Slice, Step

PROMPT = (5, 6, 7, 8, 9)


def request(id=0, max_tokens=4, **more):
    more.setdefault("sampling", Sampling(ignore_eos=True))
    return Request(id, 0.0, len(PROMPT), max_tokens, prompt=PROMPT, **more)


def prefill(id, step=0, blocks=(0,), **more):
    return Step(step, 0, 0.0, (Slice(id, 0, 0, 0, len(PROMPT), True, blocks),), starts=(request(id, **more),))


def decode(id, step, start, blocks=()):
    return Step(step, 0, 0.0, (Slice(id, 0, 0, start, 1, True, blocks),))


@pytest.fixture
def backend(llama):
    backend = TorchBackend(llama, blocks=16, block_size=16)
    yield backend
    backend.close()


@pytest.fixture
def gate(backend, monkeypatch):
    """Steps wait on the worker until the gate opens."""
    opened = threading.Event()
    prepare = backend._runner.prepare

    def slow(step, lane, pooled):
        assert opened.wait(20)
        return prepare(step, lane, pooled)

    backend.now()
    monkeypatch.setattr(backend._runner, "prepare", slow)
    yield opened
    opened.set()


def test_one_step(backend):
    backend.launch(prefill(0))
    done = backend.wait()
    assert (done.step, done.lane, done.ended) == (0, MAIN, ())
    assert len(done.tokens[0]) == 1
    assert 0 <= done.launched <= done.started - done.host <= done.started < done.finished <= backend.now()


def test_launch_returns_before_the_step_is_done(backend, gate):
    backend.launch(prefill(0))
    assert backend.wait(backend.now() + 0.01) is None
    gate.set()
    assert backend.wait().step == 0


def test_tokens_are_forwarded_between_steps_in_flight(backend, gate):
    """The whole answer is launched before any of its tokens has come back."""
    backend.launch(prefill(0))
    for step in range(1, 4):
        backend.launch(decode(0, step, len(PROMPT) + step - 1))
    gate.set()
    dones = [backend.wait() for _ in range(4)]
    assert [done.step for done in dones] == [0, 1, 2, 3]
    assert [done.ended for done in dones] == [(), (), (), (0,)]
    assert [done.finished for done in dones] == sorted(done.finished for done in dones)

    backend.launch(prefill(1, step=4, blocks=(1,)))
    for step in range(5, 8):
        backend.launch(decode(1, step, len(PROMPT) + step - 5))
    assert [backend.wait().tokens[1] for _ in range(4)] == [done.tokens[0] for done in dones]


def test_until_comes_before_a_completion_that_is_later(backend):
    backend.launch(prefill(0))
    until = backend.now()
    time.sleep(0.2)
    assert backend.wait(until) is None
    done = backend.wait(inf)
    assert done.finished > until


def test_wait_for_a_time_with_nothing_in_flight(backend):
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
        with pytest.raises(StepFailed, match="step 7 failed on the worker: sequence 0: position 9 has no token yet"):
            backend.wait()


def test_blocks_that_a_slice_lacks_are_an_error(backend):
    backend.launch(prefill(0, blocks=()))
    with pytest.raises(StepFailed, match="5 tokens do not fit its 0 blocks"):
        backend.wait()


def test_unknown_sequences_are_an_error(backend):
    backend.launch(decode(3, 0, start=0))
    with pytest.raises(StepFailed, match="sequence 3: no step has started it"):
        backend.wait()


def test_ends_are_forgotten(backend):
    backend.launch(prefill(0))
    backend.launch(Step(1, 0, 0.0, (), ends=(0,)))
    backend.launch(decode(0, 2, len(PROMPT)))
    assert backend.wait().step == 0
    with pytest.raises(StepFailed, match="or one has ended it"):
        backend.wait()


def test_slices_launched_after_the_end_bring_no_tokens(backend):
    """Run-ahead plans on before it hears of the end."""
    backend.launch(prefill(0, output_length=2))
    for step in range(1, 4):
        backend.launch(decode(0, step, len(PROMPT) + step - 1))
    dones = [backend.wait() for _ in range(4)]
    assert [0 in done.tokens for done in dones] == [True, True, False, False]
    assert [done.ended for done in dones] == [(), (0,), (), ()]


def first_tokens(backend, count):
    """The tokens that `request` gets, by a sequence of its own."""
    backend.launch(prefill(99, step=990, blocks=(15,), max_tokens=count))
    for step in range(1, count):
        backend.launch(decode(99, 990 + step, len(PROMPT) + step - 1))
    return [backend.wait().tokens[99][0] for _ in range(count)]


@pytest.mark.parametrize(
    ("ignore_eos", "stop", "output_length", "ends_at"),
    [(False, (), None, "eos"), (True, (), None, None), (True, ("third",), None, "third"), (False, ("third",), 4, None)],
)
def test_what_ends_a_sequence(backend, monkeypatch, ignore_eos, stop, output_length, ends_at):
    """End tokens unless ignored, stop tokens, and nothing but the length where a trace knows it."""
    tokens = first_tokens(backend, 4)
    assert len(set(tokens[:3])) == 3
    monkeypatch.setattr(type(backend._runner._model.config), "eos", (tokens[1],))
    sampling = Sampling(ignore_eos=ignore_eos, stop_token_ids=tuple(tokens[2] for _ in stop))
    backend.launch(prefill(0, sampling=sampling, output_length=output_length))
    for step in range(1, 4):
        backend.launch(decode(0, step, len(PROMPT) + step - 1))
    ended = [bool(backend.wait().ended) for _ in range(4)]
    assert ended.index(True) == {"eos": 1, "third": 2, None: 3}[ends_at]


def test_close_twice(llama):
    backend = TorchBackend(llama, blocks=4)
    backend.launch(prefill(0))
    backend.close()
    backend.close()


def test_spec(llama):
    spec = TorchBackend(llama, blocks=12, block_size=8, host_blocks=3, max_seqs=5, max_tokens=100, max_length=64).spec
    assert (spec.blocks, spec.block_size, spec.host_blocks) == (12, 8, 3)
    assert (spec.max_seqs, spec.max_tokens, spec.max_length) == (5, 100, 64)
    assert (spec.stages, spec.ranks, spec.forwards_tokens, spec.repeats) == (1, 1, True, False)


def test_pool_is_sized_from_memory_and_never_beyond_use(llama):
    spec = TorchBackend(llama, max_seqs=2, max_length=64).spec
    assert spec.blocks == 2 * 4


def test_impossible_sizes_say_what_to_change(llama):
    with pytest.raises(EngineError, match=r"kv.blocks=1000000000000: no memory .* ask for fewer blocks"):
        TorchBackend(llama, blocks=10**12)
    with pytest.raises(EngineError, match="max_length=99999 is more than the model's 16384"):
        TorchBackend(llama, blocks=4, max_length=99999)
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        TorchBackend(llama, blocks=4, block_size=0)
