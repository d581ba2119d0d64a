"""The real scheduler and loop over real ranks: the tokens of one rank, and a trace that the simulator can follow."""

from contextlib import closing
from dataclasses import replace

import pytest

from engine.backend import TorchBackend
from engine.load import load_model
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.launch import spawned
from engine.parallel.layout import Layout
from engine.tiny import tiny
from playground.check.parity import replay
from playground.check.recording import load
from playground.core import Sampling
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import NoTrace, read
from playground.workload.source import OpenLoop
from policies.budget import Unified
from policies.composed import Composed
from policies.victims import Largest
from tests.parity.runs import fresh, record, requests

SIZES = {"blocks": 20, "max_seqs": 12, "max_tokens": 256, "max_length": 512}


class Overheard:
    """A backend, and all tokens that it returned."""

    def __init__(self, inner):
        self.inner, self.spec = inner, inner.spec
        self.now, self.launch, self.close = inner.now, inner.launch, inner.close
        self.tokens = {}

    def wait(self, until):
        done = self.inner.wait(until)
        for id, tokens in done.tokens.items() if done else ():
            self.tokens.setdefault(id, []).extend(tokens)
        return done


def workload(count=12):
    """Greedy and random ones by turns, of which every third one shares its beginning."""
    return [
        replace(
            one,
            hashes=(*one.hashes[:2], *[1000 + id for id in one.hashes[2:]]),  # ids of no other depth: tokens matter
            sampling=Sampling(temperature=0.8 * (one.id % 2), seed=one.id),
        )
        for one in requests(count, 0.002)
    ]


def policy():
    return Composed(Unified(64), victims=Largest())


@pytest.fixture(scope="module")
def expected():
    with closing(Overheard(TorchBackend(load_model(tiny("llama")), **SIZES))) as backend:
        serve(OpenLoop(workload()), Scheduler(backend.spec, policy()), backend, NoTrace())
        return backend.tokens


def test_tokens_of_replicas_of_pipelines_are_those_of_one_rank(expected, tmp_path):
    """With preemption: each replica's pool holds a few sequences only."""
    layout = Layout(replicas=2, stages=2)
    config = WorkerConfig(str(tiny("llama")), layout, f"file://{tmp_path / 'meet'}", sizes=SIZES)
    backend = Overheard(ParallelBackend(config, spawned(layout.ranks)))
    record(tmp_path / "run", policy(), backend, workload())
    assert backend.tokens == expected
    assert max(read(tmp_path / "run", "requests").to_pydict()["preemptions"]) > 0
    recording = load(tmp_path / "run")
    assert replay(recording, fresh(recording.spec, policy())).requests == 12
