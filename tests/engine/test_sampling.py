"""Sampled tokens depend on the request's seed and on nothing that scheduling does."""

import pytest

from engine.kv import KvPool
from engine.runner import Pools, Runner
from playground.core import Sampling
from tests.engine.driver import Driver

PROMPT = (9, 8, 7, 6, 5)
HOT = {"temperature": 1.5, "ignore_eos": True}


@pytest.fixture
def driver(llama):
    pool = KvPool(llama.shape, 64, 4, llama.dtype)
    return Driver(Runner(llama, {0: Pools(pool)}), range(64), 4)


def answer(driver, id, tokens=12, **sampling):
    driver.add(id, PROMPT, tokens, Sampling(**HOT | sampling))
    return driver.decode(id)[0]


def test_equal_seeds_give_equal_answers(driver):
    assert answer(driver, 1, seed=7) == answer(driver, 2, seed=7)


def test_other_seeds_give_other_answers(driver):
    assert answer(driver, 1, seed=7) != answer(driver, 2, seed=8)


def test_no_temperature_is_greedy(driver):
    assert answer(driver, 1, temperature=0.0, seed=1) == answer(driver, 2, temperature=0.0, seed=2)
    assert answer(driver, 3, top_k=1, seed=3) == driver.live[1].output


def test_batching_chunks_and_preemption_change_nothing(driver):
    options = [{"seed": 1}, {"seed": 2, "top_k": 40}, {"seed": 3, "top_p": 0.8}, {"seed": 4, "temperature": 0.0}]
    alone = [answer(driver, id, **option) for id, option in enumerate(options)]
    for id, option in enumerate(options, 10):
        driver.add(id, PROMPT, 12, Sampling(**HOT | option))
    driver.run(driver.slice(10), driver.slice(11, 2))
    driver.run(driver.slice(10), driver.slice(11, 3), driver.slice(12, 1), driver.slice(13))
    driver.preempt(10)
    assert driver.decode(*range(10, 14)) == alone
