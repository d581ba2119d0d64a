"""Layers that move between stages of the CUDA backend, on a host that plays the GPU."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from queue import Queue

import pytest
import torch

from engine.parallel.layout import Layout
from engine.parallel.moving import Link, Mover
from engine.tiny import tiny
from playground.core import LayerMove
from tests.engine.cuda_host import BackendDriver
from tests.engine.test_cuda_stages import Line, Pipeline, part_of

SIZES = {"blocks": 64, "max_seqs": 4, "host_blocks": 32}


class Waiting(Line):
    """Its taker may come first."""

    def __init__(self):
        self.queue = Queue()
        self.sent = ()

    def send(self, x):
        self.queue.put(x.clone())

    def receive(self, like):
        return like.copy_(self.queue.get(timeout=20))


class Both(Link):
    """One end of two lines, to and from a stage."""

    def __init__(self, there, back):
        self._device, self._there, self._back = torch.device("cpu"), there, back

    def send(self, x):
        self._there.send(x)

    def receive(self, x):
        self._back.receive(x)


class Moving(Pipeline):
    """Two stages, each in a thread of its own while it is given a step: they wait for one another."""

    def __init__(self, folder, layout, **options):
        self.threads = ThreadPoolExecutor(layout.stages)
        super().__init__(folder, layout, **options)

    def launch(self, step):
        self.steps[step.id] = step
        known, self.known = self.known, []

        def given(stage):
            stage.learn(known)
            stage.launch(step)

        list(self.threads.map(given, self.stages))


@pytest.fixture
def made(monkeypatch):
    """The pipeline that `Pipeline` would make, with lines that wait and layers that may move."""
    onward, back = Waiting(), Waiting()
    links = [{1: Both(onward, back)}, {0: Both(back, onward)}]

    def part(folder, layout, place, part):
        mover = Mover(place.stage, layout.cut(4), layout.spare_layers, links[place.stage])
        return part_of(folder, layout, place, replace(part, mover=mover))

    monkeypatch.setattr("tests.engine.test_cuda_stages.Line", Waiting)
    monkeypatch.setattr("tests.engine.test_cuda_stages.part_of", part)
    backend = Moving(tiny("llama"), Layout(stages=2, spare_layers=2), **SIZES)
    yield backend
    backend.close()
    backend.threads.shutdown()


def answers(backend, moves):
    """Tokens of three sequences, one of which is swapped out and in; `moves`: by round."""
    driver = BackendDriver(backend, range(64), range(32))
    for id, prompt in enumerate([[5, 6, 7, 8, 9], [11] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]):
        driver.add(id, prompt, 12)
    for turn in range(10):
        going = [id for id in range(3) if id != 1 or not 4 <= turn <= 7]
        copies = [driver.swap_out(1)] if turn == 4 else [driver.swap_in(1)] if turn == 7 else []
        step = driver.step(*map(driver.slice, going), *copies)
        step.move = LayerMove(moves[turn], 3) if turn in moves else None
        driver.launch(step)
        for _ in step.lanes:
            driver.take_back(backend.wait())
    return backend.tokens


def test_tokens_stay_and_graphs_are_captured_again(made):
    with closing(Pipeline(tiny("llama"), Layout(stages=2), **SIZES)) as still:
        expected = answers(still, {})
    assert (made.spec.layers, made.spec.spare_layers) == ((2, 2), 2)
    captured = [len(stage._graphs) for stage in made.stages]
    assert answers(made, {2: (3, 1), 5: (1, 3), 6: (2, 2), 8: (3, 1)}) == expected
    assert [len(stage._pool.layers) for stage in made.stages] == [3, 1]
    assert all(len(stage._graphs) < before for stage, before in zip(made.stages, captured, strict=True))
