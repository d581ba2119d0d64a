"""The CUDA backend on the host: its greedy float32 tokens equal those of transformers, however the work is cut."""

import random
from itertools import pairwise

import pytest

from engine.cuda.backend import CudaBackend
from playground.core import Sampling
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host

TOKENS = 24
SIZE = 4
BLOCKS = 160


@pytest.fixture(scope="session")
def twin(checkpoint):
    return load_on_host(checkpoint)


def backend_for(model, **options):
    options = dict(blocks=BLOCKS, block_size=SIZE, host_blocks=64, max_seqs=8, max_tokens=256, max_length=160) | options
    backend = CudaBackend(model, timeline=HostTimeline(), **options)
    backend.now()
    backend._pool.data.fill_(float("nan"))  # reading what was never written shows
    return backend


@pytest.fixture(params=["graphs", "eager"])
def driver(request, twin):
    """Blocks are handed out in a shuffled order."""
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    backend = backend_for(twin, graphs=request.param == "graphs")
    yield BackendDriver(backend, order, range(64))
    backend.close()


def fill(driver, prompts):
    for id, prompt in enumerate(prompts):
        driver.add(id, prompt, TOKENS)
    return range(len(prompts))


def test_alone(driver, prompts, expected):
    for id in fill(driver, prompts):
        assert driver.decode(id) == [expected[id]]


def test_together(driver, prompts, expected):
    assert driver.decode(*fill(driver, prompts)) == expected


@pytest.mark.parametrize("chunk", [1, 7])
def test_odd_chunks(driver, prompts, expected, chunk):
    for id in fill(driver, prompts):
        live = driver.live[id]
        while live.computed < live.request.prompt_length:
            driver.run(driver.slice(id, min(chunk, live.request.prompt_length - live.computed)))
    assert driver.decode(*range(len(prompts))) == expected


def test_chunks_and_decodes_in_one_step(driver, prompts, expected):
    ids = fill(driver, prompts)
    for id in ids:
        live = driver.live[id]
        while live.computed < live.request.prompt_length:
            going = [other for other in range(id) if not driver.live[other].ended]
            left = live.request.prompt_length - live.computed
            driver.run(*(driver.slice(other) for other in going), driver.slice(id, min(3, left)))
    assert driver.decode(*ids) == expected


def test_recomputed_after_preemption(driver, prompts, expected):
    ids = fill(driver, prompts)
    for id in ids:
        driver.run(driver.slice(id))
    for round in range(6):
        driver.run(*(driver.slice(id) for id in ids))
        driver.preempt(round % len(prompts))
    assert driver.decode(*ids) == expected


def test_swapped_out_and_in(driver, prompts, expected):
    ids = fill(driver, prompts)
    for id in ids:
        driver.run(driver.slice(id))
    driver.run(*(driver.slice(id) for id in ids))
    driver.run(driver.slice(0), driver.swap_out(1), driver.swap_out(3))
    driver.run(driver.slice(0), driver.swap_in(3))
    driver.run(driver.slice(3), driver.swap_in(1))
    assert driver.decode(*ids) == expected


def test_shared_prefix(driver, prompts, expected):
    prompt, tokens = prompts[3], len(prompts[3]) // SIZE * SIZE - SIZE
    driver.add(0, prompt, TOKENS)
    driver.run(driver.slice(0))
    driver.add(1, prompt, TOKENS)
    driver.run(driver.share(1, 0, tokens))
    assert driver.decode(0, 1) == [expected[3]] * 2


def test_run_ahead(driver, prompts, expected):
    """All of it is launched before any token has come back: inputs are what the device itself sampled."""
    ids, backend = fill(driver, prompts), driver.backend
    timeline = backend._timeline
    timeline.hold = True
    steps = [driver.step(*(driver.slice(id) for id in ids))]
    for _ in range(TOKENS - 1):
        for id in ids:
            driver.live[id].output.append(-1)  # promised
        steps.append(driver.step(*(driver.slice(id) for id in ids)))
    for step in steps:
        backend.launch(step)
    assert backend.wait(backend.now()) is None
    for id in ids:
        driver.live[id].output.clear()
    timeline.let_go()
    dones = [backend.wait() for _ in steps]
    for done in dones:
        driver.take_back(done)
    assert [driver.live[id].output for id in ids] == expected
    assert all(a.finished <= b.finished for a, b in pairwise(dones))
    assert dones[-1].ended == tuple(ids)


def test_seeded_sampling_beside_greedy(driver, prompts, expected):
    """A drawn token depends on its seed and position only; greedy neighbours are not touched by it."""
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=(1 << 70) + 5, ignore_eos=True)
    driver.add(0, prompts[0], 12, sampling)
    alone = driver.decode(0)[0]
    driver.add(1, prompts[1], TOKENS)
    driver.add(2, prompts[0], 12, sampling)
    driver.add(3, prompts[0], TOKENS)
    assert driver.decode(1, 2, 3) == [expected[1], alone, expected[0]]
    assert alone != expected[0][:12]


def test_more_sequences_than_slots(twin, prompts, expected):
    """Sequences that wait give their slots to others, and get all of it back later."""
    backend = backend_for(twin, max_seqs=1)
    driver = BackendDriver(backend, range(BLOCKS))
    ids = fill(driver, prompts)
    for _ in range(3):
        for id in ids:
            driver.run(driver.slice(id))
            driver.preempt(id)
    for id in ids:
        assert driver.decode(id) == [expected[id]]
    backend.close()
