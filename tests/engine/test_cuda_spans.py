"""What the host knows of a step's slices, told beside the numbers on the device: both are the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.config import read_config
from engine.cuda.backend import CudaBackend
from engine.models.decoder import Decoder
from engine.tiny import tiny
from engine.weights import read_weights
from kernels.registry import select
from tests.engine.cuda_host import BackendDriver, HostTimeline, Unpacked, place_qkv


@pytest.fixture
def serving():
    """(a driver of a backend, the spans that attention was told), with graphs or without."""
    config, told = read_config(tiny()), []

    class Noted(Unpacked):
        def __init__(self, batch):
            super().__init__(batch)
            told.append(list(batch.spans))
            if batch.spans:
                assert told[-1] == spans_on_device(batch)

    ops = replace(select("cpu"), attention=Noted, place_qkv=place_qkv)
    model = Decoder(config, read_weights(tiny(), config.shape, torch.float32, "cpu"), ops)
    backends = []

    def serve(graphs):
        backend = CudaBackend(
            model, blocks=40, block_size=4, max_seqs=4, max_tokens=64, max_length=64, graphs=graphs,
            timeline=HostTimeline(),
        )  # fmt: skip
        backends.append(backend)
        backend.now()
        told.clear()
        return BackendDriver(backend, range(40)), told

    yield serve
    for backend in backends:
        backend.close()


def spans_on_device(batch):
    """What the tensors say, but for empty slices at the end."""
    contexts = batch.contexts.tolist()
    lengths = [int(context > 0) for context in contexts[: batch.decodes]]
    if batch.offsets is not None:
        lengths += [end - begin for begin, end in pairwise(batch.offsets.tolist())]
    spans = [(context - length, length) for context, length in zip(contexts, lengths, strict=True)]
    while len(spans) > batch.decodes and spans[-1][1] == 0:
        spans.pop()
    return spans


def drive(driver):
    """First chunks, a chunk with history beside a decode, and decodes alone."""
    for id, prompt in enumerate((range(5, 16), (7, 8, 9), range(40, 60))):
        driver.add(id, tuple(prompt), 6)
    driver.run(driver.slice(0), driver.slice(2, 7))
    driver.run(driver.slice(2, 12), driver.slice(0), driver.slice(1))
    driver.run(driver.slice(2), driver.slice(0))
    driver.run(driver.slice(0), driver.slice(1))


def test_eager_steps_say_what_they_hold(serving):
    driver, told = serving(graphs=False)
    drive(driver)
    padding = [(0, 0)] * 7
    assert told == [
        [(0, 11), (0, 7)],
        [(11, 1), *padding, (7, 12), (0, 3)],
        [(19, 1), (12, 1)] + [(0, 0)] * (len(told[2]) - 2),
        [(13, 1), (3, 1)],
    ]


def test_graphs_serve_for_others_and_say_nothing(serving):
    driver, told = serving(graphs=True)
    drive(driver)
    assert told and not any(told)
