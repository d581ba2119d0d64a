"""The CUDA backend on the host, with steps in two halves: cut as elsewhere, and the same tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import read_config
from engine.cuda.forward import Forward, Shape, Turns
from engine.cuda.graphs import Graphs
from engine.cuda.residents import Batch, Rows
from engine.cuda.state import Picking
from engine.cuda.turns import halves
from engine.models.decoder import WHOLE, Decoder
from engine.overlap import Overlap, halved
from engine.weights import read_weights
from playground.core import Sampling, Slice
from tests.engine.cuda_host import BackendDriver, host_ops
from tests.engine.test_cuda_correctness import BLOCKS, TOKENS, backend_for

TWO_BATCH = Overlap("two_batch")


@pytest.fixture(scope="module")
def twin(checkpoint):
    config = read_config(checkpoint)
    weights = read_weights(checkpoint, config.shape, torch.float32, "cpu")
    return Decoder(config, weights, host_ops(), replace(WHOLE, overlap=TWO_BATCH))


@pytest.fixture
def driver(request, twin, monkeypatch):
    monkeypatch.setattr(
        Graphs, "capture_all", lambda self, picking: None
    )  # on first use they are captured all the same
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    backend = backend_for(twin, graphs=getattr(request, "param", False))
    yield BackendDriver(backend, order, range(64))
    backend.close()


@pytest.fixture
def passes(monkeypatch):
    """How many a step was computed in, step by step."""
    seen, made = [], Forward._passes

    def noted(self, parts, shape, known):
        found = made(self, parts, shape, known)
        seen.append((type(shape), len(found)))
        return found

    monkeypatch.setattr(Forward, "_passes", noted)
    return seen


@pytest.mark.parametrize("driver", [True, False], ids=["graphs", "eager"], indirect=True)
def test_prompts_together_are_cut_and_decodes_halved(driver, passes, prompts, expected):
    ids = range(len(prompts))
    for id, prompt in enumerate(prompts):
        driver.add(id, prompt, TOKENS)
    driver.run(*[driver.slice(id, len(prompt)) for id, prompt in enumerate(prompts)])
    assert (Turns, 2) in passes
    assert driver.decode(*ids) == expected
    assert (Shape, 2) in passes


def test_penalties_and_drawn_tokens_beside_greedy(driver, prompts, expected):
    """Whose token a row of logits is must be right in both halves."""
    driver.add(0, prompts[0], TOKENS)
    driver.add(1, prompts[1], TOKENS, Sampling(temperature=1.0, seed=3, repetition_penalty=1.2, logprobs=2))
    driver.add(2, prompts[2], TOKENS)
    driver.run(driver.slice(0, 3), driver.slice(1, len(prompts[1])), driver.slice(2, len(prompts[2])))
    driver.run(driver.slice(0, len(prompts[0]) - 3), driver.slice(2, 1))
    assert driver.decode(0, 2) == [expected[0], expected[2]]


@pytest.mark.parametrize("lengths", [(1, 9, 3), (4, 1, 1, 1), (2, 2, 40, 1), (7, 6, 1), (5,)])
@pytest.mark.parametrize("threshold", [0.0, 0.48])
def test_halves_are_those_of_slices(lengths, threshold):
    slices = [Slice(id, 0, 0, 3 * id, length, id % 2 == 0, ()) for id, length in enumerate(lengths)]
    wanted = halved(slices, threshold)
    rows = Rows(slices, np.arange(len(slices)), Picking.GREEDY)
    samples = [part.samples for part in slices]
    batch = Batch.of(rows, [part.start for part in slices], list(lengths), samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "of", classmethod(lambda cls, chosen: cls(chosen, np.zeros(len(chosen)), Picking.GREEDY)))
        found = halves(batch, threshold)
    if not all(wanted):
        assert found is None
        return
    for mine, theirs in zip(found, wanted, strict=True):
        assert [part.sequence for part in mine.rows.residents] == [part.sequence for part in theirs]
        assert mine.starts.tolist() == [part.start for part in theirs]
        assert mine.lengths.tolist() == [part.length for part in theirs]
        assert mine.samples.tolist() == [part.samples for part in theirs]
        assert mine.singles == [part.length for part in theirs].count(1)
