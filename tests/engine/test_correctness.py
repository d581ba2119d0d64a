"""Greedy float32 tokens equal those of transformers, however the work is cut into steps."""

import random

import pytest
import torch

from engine.kv import KvPool
from engine.runner import Pools, Runner
from tests.engine.driver import Driver

TOKENS = 24
SIZE = 4
BLOCKS = 160


def poisoned(model, blocks=BLOCKS, size=SIZE):
    """A pool in which reading what was never written shows."""
    pool = KvPool(model.shape, blocks, size, model.dtype)
    pool.data.fill_(float("nan"))
    return pool


@pytest.fixture
def driver(model):
    """Blocks are handed out in a shuffled order."""
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    pools = Pools(poisoned(model), poisoned(model, 64))
    return Driver(Runner(model, {0: pools}), order, SIZE, range(64))


def fill(driver, prompts):
    for id, prompt in enumerate(prompts):
        driver.add(id, prompt, TOKENS)
    return range(len(prompts))


def test_whole_prefill_alone(driver, prompts, expected):
    for id in fill(driver, prompts):
        assert driver.decode(id) == [expected[id]]


def test_whole_prefill_together(driver, prompts, expected):
    assert driver.decode(*fill(driver, prompts)) == expected


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_odd_chunks(driver, prompts, expected, chunk):
    for id in fill(driver, prompts):
        live = driver.live[id]
        while live.computed < live.request.prompt_length:
            driver.run(driver.slice(id, min(chunk, live.request.prompt_length - live.computed)))
    assert driver.decode(*range(len(prompts))) == expected


def test_chunks_and_decodes_in_one_step(driver, prompts, expected):
    """A new prompt trickles in, three tokens a step, while the others decode."""
    ids = fill(driver, prompts)
    for id in ids:
        live = driver.live[id]
        while live.computed < live.request.prompt_length:
            chunk = driver.slice(id, min(3, live.request.prompt_length - live.computed))
            decodes = [driver.slice(other) for other in range(id) if not driver.live[other].ended]
            driver.run(*decodes, chunk)
    assert driver.decode(*ids) == expected


def test_random_steps(driver, prompts, expected):
    """Random subsets, random chunks, random preemptions."""
    rng = random.Random(7)
    ids = fill(driver, prompts)
    while going := [id for id in ids if not driver.live[id].ended]:
        parts = []
        for id in rng.sample(going, rng.randint(1, len(going))):
            live = driver.live[id]
            if live.computed > 8 and rng.random() < 0.1:
                driver.preempt(id)
            parts.append(driver.slice(id, rng.randint(1, live.length - live.computed)))
        driver.run(*parts)
    assert [driver.live[id].output for id in ids] == expected


def test_preempt_and_recompute(driver, prompts, expected):
    ids = fill(driver, prompts)
    for _ in range(6):
        driver.run(*(driver.slice(id) for id in ids))
    driver.preempt(1)
    driver.run(driver.slice(0), driver.slice(1, 5))
    driver.preempt(1)
    assert driver.decode(*ids) == expected


def test_prefix_reuse(driver, prompts, oracle):
    """A second sequence starts with the blocks of the first one's prompt and adds its own."""
    prefix = prompts[1][: 4 * SIZE]
    driver.add(0, prompts[1], TOKENS)
    driver.run(driver.slice(0))
    other = prefix + prompts[2]
    driver.add(1, other, TOKENS)
    driver.run(driver.slice(0), driver.share(1, 0, len(prefix)))
    assert driver.decode(0, 1) == [oracle(prompts[1], TOKENS), oracle(other, TOKENS)]


def test_swap(driver, prompts, expected):
    """To the host and back to other blocks, while another sequence overwrites the old ones."""
    driver.add(0, prompts[0], TOKENS)
    driver.add(1, prompts[1], TOKENS)
    for _ in range(4):
        driver.run(driver.slice(0), driver.slice(1))
    old = list(driver.live[0].blocks)
    driver.run(driver.swap_out(0))
    driver.free = driver.free[::-1]  # the freed blocks come first
    driver.add(2, prompts[3], TOKENS)
    driver.run(driver.slice(1), driver.slice(2))
    driver.run(driver.slice(1), driver.swap_in(0))
    assert driver.live[0].blocks != old
    assert driver.decode(0, 1, 2) == [expected[0], expected[1], expected[3]]


def test_swap_in_and_slice_in_one_step(driver, prompts, expected):
    driver.add(0, prompts[0], TOKENS)
    driver.run(driver.slice(0))
    driver.run(driver.swap_out(0))
    back = driver.swap_in(0)
    driver.run(driver.slice(0), back)
    assert driver.decode(0) == [expected[0]]


def test_two_lanes_of_one_sequence(driver, prompts, expected):
    driver.add(0, prompts[1], TOKENS)
    first = driver.slice(0, 5, lane="a")
    driver.run(first, driver.slice(0, lane="b"))
    assert driver.decode(0) == [expected[1]]


def test_logits_equal_transformers(model, prompts, oracle):
    """Tokens agree by more than luck: so do the logits."""
    driver = Driver(Runner(model, {0: Pools(poisoned(model))}), range(BLOCKS), SIZE)
    seen = []
    call = model.__class__.__call__

    def spy(self, inputs, pool):
        seen.append(call(self, inputs, pool))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.__class__, "__call__", spy)
        driver.add(0, prompts[3], 1)
        driver.run(driver.slice(0, 9))
        driver.run(driver.slice(0))
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([prompts[3]])).logits[0, -1]
    torch.testing.assert_close(seen[-1][0], theirs, rtol=1e-4, atol=1e-4)
