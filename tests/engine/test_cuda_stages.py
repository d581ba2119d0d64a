"""The CUDA backend as one rank of many, on a host that plays the GPU: stages, and a team, serve what one rank does."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from math import inf
from threading import Barrier
from time import sleep

import pytest
import torch

from engine.backend import TorchBackend
from engine.config import read_config
from engine.cuda.backend import CudaBackend
from engine.cuda.state import Picking
from engine.errors import StepFailed
from engine.load import load_model
from engine.models.decoder import Decoder, Part
from engine.parallel.layout import Layout, Place, local_config
from engine.shard import Cut
from engine.tiny import tiny
from engine.weights import read_weights
from playground.core import Sampling
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import NoTrace
from playground.workload.source import OpenLoop
from policies.budget import Unified
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import Largest
from tests.engine.cuda_host import BackendDriver, HostTimeline, host_ops, load_on_host
from tests.parity.runs import requests

SIZES = {"blocks": 20, "max_seqs": 12, "max_tokens": 256, "max_length": 512}


class Line:
    """From one stage to the next: what is sent comes in the same order."""

    def __init__(self):
        self.sent = deque()

    def send(self, x):
        self.sent.append(x.clone())

    def receive(self, like):
        return like.copy_(self.sent.popleft())


class Back(Line):
    """Where it is received before it is sent."""

    def __init__(self):
        super().__init__()
        self.due = deque()

    def receive(self, like):
        self.due.append(like.fill_(-1))
        return like

    def send(self, x):
        self.due.popleft().copy_(x)


def stage_of(folder, layout, stage, lines, back=None):
    """A stage's decoder; `lines[i]` leads from stage i to the next, `back` from the last to the first."""
    last = layout.stages - 1
    part = Part(
        first=stage == 0,
        last=stage == last,
        stages=layout.stages,
        before=lines[stage - 1] if stage else None,
        after=lines[stage] if stage < last else None,
        back=back if stage in (0, last) else None,
    )
    return part_of(folder, layout, Place(0, stage, 0), part)


def part_of(folder, layout, place, part):
    """A rank's decoder, which computes on the host as it would on a GPU."""
    config = read_config(folder)
    keep = Cut(config.shape, layout.span(place.stage, config.shape.layers), place.tp_rank, layout.tp)
    weights = read_weights(folder, config.shape, torch.float32, "cpu", keep=keep)
    return Decoder(local_config(config, layout, place), weights, host_ops(), part)


class Pipeline:
    """Stages in one process, told what `ParallelBackend` tells its workers, and put together as it does."""

    def __init__(self, folder, layout, forwards=False, **options):
        """`forwards`: sampled tokens go from the last stage to the first directly, too."""
        self.lines, self.back = [Line() for _ in range(layout.stages - 1)], Back() if forwards else None
        self.stages = [
            CudaBackend(
                stage_of(folder, layout, stage, self.lines, self.back), timeline=HostTimeline(), **(SIZES | options)
            )
            for stage in range(layout.stages)
        ]
        for stage in self.stages:
            stage.start()
            stage._pool.data.fill_(float("nan"))
        assert [stage.spec.forwards_tokens for stage in (self.stages[0], self.stages[-1])] == [forwards] * 2
        self.spec = replace(self.stages[-1].spec, stages=layout.stages)
        self.now = self.stages[0].now
        self.tokens, self.known, self.steps, self.owed, self.ahead = {}, [], {}, set(), False

    def launch(self, step):
        self.steps[step.id] = step
        self.ahead |= any(part.sequence in self.owed for part in step.slices)
        self.owed |= {part.sequence for part in step.slices if part.samples}
        known, self.known = self.known, []
        for stage in self.stages:
            if stage in (self.stages[0], self.stages[-1]):  # those between embed no tokens and need none
                stage.learn(known)
            stage.launch(step)

    def wait(self, until=inf):
        first = self.stages[0].wait(until)
        if first is None:
            return None
        parts = [first, *(stage.wait() for stage in self.stages[1:])]
        assert all(part.tokens == part.logprobs == {} and part.ended == () for part in parts[:-1])
        assert {(part.step, part.lane) for part in parts} == {(first.step, first.lane)}
        done = replace(parts[-1], launched=first.launched, started=first.started)
        self.known += sampled(self.steps[done.step], done)
        self.owed -= done.tokens.keys()
        for id, tokens in done.tokens.items():
            self.tokens.setdefault(id, []).extend(tokens)
        return done

    def close(self):
        for stage in self.stages:
            stage.close()
        assert not any(line.sent for line in self.lines)


def sampled(step, done):
    """Sequence, position and token of those that go on."""
    ends = {part.sequence: part.start + part.length for part in step.slices}
    return [(id, ends[id], token) for id, (token,) in done.tokens.items() if id not in done.ended]


def workload():
    """Greedy and random ones by turns, some penalised or with logprobs; every third one shares its beginning."""
    return [
        replace(
            one,
            sampling=Sampling(
                temperature=0.8 * (one.id % 2),
                seed=one.id,
                repetition_penalty=1.2 if one.id % 5 == 1 else 1.0,
                logprobs=1 if one.id == 4 else None,
            ),
        )
        for one in requests(9, 0.002)
    ]


class Seen(NoTrace):
    """What happened to sequences, and what each had of the prefix cache."""

    def __init__(self):
        self.events, self.cached = [], 0

    def happened(self, event):
        self.events.append(event.kind)

    def ended(self, ended):
        self.cached += ended.sequence.cached_tokens


def serve_all(backend, aborts=(), ahead=1):
    seen, policy = Seen(), Composed(Unified(64), victims=Largest(), overlap=Overlap(ahead))
    scheduler = Scheduler(backend.spec, policy, prefix_cache=True)
    serve(OpenLoop(workload(), aborts), scheduler, backend, seen)
    scheduler.check()
    return seen


class Alone(Pipeline):
    """One stage: the whole model on torch."""

    def __init__(self):
        self.lines, self.stages = [], [TorchBackend(load_model(tiny("llama")), **SIZES)]
        self.spec, self.now = self.stages[0].spec, self.stages[0].now
        self.tokens, self.known, self.steps, self.owed, self.ahead = {}, [], {}, set(), False


@pytest.fixture(scope="module")
def expected():
    with closing(Alone()) as backend:
        serve_all(backend)
        return backend.tokens


@pytest.mark.parametrize(
    ("layout", "graphs"), [(Layout(stages=2, layers=(1, 3)), True), (Layout(stages=3), False)], ids=["2", "3"]
)
def test_tokens_are_those_of_one_rank(expected, layout, graphs):
    """With preemption, prefix hits, and graphs that are captured in the middle, by the last stage alone."""
    with closing(Pipeline(tiny("llama"), layout, graphs=graphs)) as backend:
        seen = serve_all(backend)
        assert backend.stages[0]._state.counts is None  # nobody is penalised where nothing is picked
    assert backend.tokens == expected
    assert "recompute" in seen.events
    assert seen.cached


@pytest.mark.parametrize("stages", [2, 3])
def test_running_ahead(expected, stages):
    """Sequences go on before their tokens have come back: those come from the last stage to the first directly."""
    with closing(Pipeline(tiny("llama"), Layout(stages=stages), forwards=True, graphs=stages == 2)) as backend:
        seen = serve_all(backend, ahead=2)
        assert backend.ahead
        assert not backend.back.due  # all that was sent is received: nobody is left waiting
    assert backend.tokens == expected
    assert "recompute" in seen.events


def test_clients_that_go_away(expected):
    """Tokens of theirs are learnt when they are forgotten already, or going to be."""
    with closing(Pipeline(tiny("llama"), Layout(stages=2), graphs=False)) as backend:
        seen = serve_all(backend, [(0.03 * (1 + id), id) for id in range(4)])
    assert "abort" in seen.events
    assert all(backend.tokens[id] == expected[id] for id in range(4, 9))
    assert all(backend.tokens.get(id, []) == expected[id][: len(backend.tokens.get(id, []))] for id in range(4))


@pytest.fixture
def driver():
    backend = Pipeline(tiny("llama"), Layout(stages=2), blocks=64, max_seqs=1, host_blocks=32)
    yield BackendDriver(backend, range(64), range(32))
    backend.close()


def test_swaps_and_more_sequences_than_slots(driver):
    """Whoever loses its slot, or its blocks, is told the first stage's device anew: what it had learnt is kept."""
    prompts = [[5, 6, 7, 8, 9], [11] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]
    with closing(CudaBackend(load_on_host(tiny("llama")), timeline=HostTimeline(), **SIZES)) as backend:
        alone = BackendDriver(backend, range(20))
        expected = [alone.add(id, prompt, 12) and alone.decode(id)[0] for id, prompt in enumerate(prompts)]
    for id, prompt in enumerate(prompts):
        driver.add(id, prompt, 12)
    for round in range(3):
        for id in range(3):
            driver.run(driver.slice(id))
            if round == id:
                driver.preempt(id)
    driver.run(driver.slice(0), driver.swap_out(1))
    driver.run(driver.slice(2), driver.swap_in(1))
    assert [driver.decode(id)[0] for id in range(3)] == expected


def test_every_stage_may_have_steps_of_other_sequences():
    """As many as stages, and as many again while those that came back are not collected yet."""
    with closing(Pipeline(tiny("llama"), Layout(stages=4), max_seqs=1, graphs=False)) as backend:
        driver = BackendDriver(backend, range(20))
        for id in range(8):
            driver.add(id, (5, 6, 7 + id), 2)
            driver.launch(driver.step(driver.slice(id)))
        assert [list(backend.wait().tokens) for _ in range(8)] == [[id] for id in range(8)]


def test_an_unknown_token_is_no_input(driver):
    """The first stage is not told what the last one sampled: it computes nothing."""
    driver.add(0, (5, 6, 7), 4)
    driver.run(driver.slice(0))
    pipeline = driver.backend
    pipeline.known.clear()
    first = pipeline.stages[0]
    first.launch(driver.step(driver.slice(0)))
    with pytest.raises(StepFailed, match="position 3 has no token yet; 3 known"):
        first.wait()


def test_exchanging_is_not_computing(driver):
    """A stage waits for the one before ahead of its work, and sends when its work is done."""
    line = driver.backend.lines[0]
    send, receive = line.send, line.receive
    line.send = lambda x: (sleep(0.1), send(x))
    line.receive = lambda like: (sleep(0.1), receive(like))[1]
    driver.add(0, (5, 6, 7), 4)
    step = driver.step(driver.slice(0))
    for stage in driver.backend.stages:
        stage.launch(step)
    first, last = (stage.wait() for stage in driver.backend.stages)
    assert first.finished - first.launched < 0.1
    assert last.started - last.launched >= 0.1
    assert last.finished - last.started < 0.1


def test_buffers_hold_the_largest_step():
    """Of graphs, too, whose steps may be larger than any that is asked for."""
    layout, lines = Layout(stages=2), [Line()]
    for graphs, tokens in ((True, 528 + 8), (False, 64 + 8)):
        stage = stage_of(tiny("llama"), layout, 1, lines)
        sizes = dict(blocks=4, max_seqs=2, max_tokens=64, max_length=64)
        with closing(CudaBackend(stage, graphs=graphs, timeline=HostTimeline(), **sizes)) as backend:
            assert backend._inlet.hidden.shape == (tokens, stage.shape.hidden)


class Table:
    """Where two ranks, each a thread, put what they give and find what both gave."""

    def __init__(self):
        self.met, self.given = Barrier(2, timeout=60), [None, None]

    def exchanged(self, rank, x):
        self.given[rank] = x.clone()
        self.met.wait()
        both = tuple(self.given)
        self.met.wait()
        return both


class Team:
    def __init__(self, rank, table):
        self.rank, self.size, self.table = rank, 2, table

    def add_sum(self, partial, x):
        x.add_(sum(self.table.exchanged(self.rank, partial)))
        return lambda: x

    def sum(self, x):
        x.copy_(sum(self.table.exchanged(self.rank, x)))

    def gather(self, x):
        return torch.cat(self.table.exchanged(self.rank, x), 1)


class Pair:
    """Two tensor-parallel ranks, which are told the same at the same time."""

    def __init__(self, folder, **options):
        layout, table = Layout(tp=2), Table()
        self.ranks = [
            CudaBackend(
                part_of(folder, layout, Place(0, 0, rank), Part(team=Team(rank, table))),
                timeline=HostTimeline(), **(SIZES | options),
            )
            for rank in range(2)
        ]  # fmt: skip
        self.threads, self.tokens = ThreadPoolExecutor(2), {}
        self.both(CudaBackend.start)
        self.spec, self.now = self.ranks[0].spec, self.ranks[0].now

    def both(self, do, *arguments):
        return list(self.threads.map(lambda rank: do(rank, *arguments), self.ranks))

    def launch(self, step):
        self.both(CudaBackend.launch, step)

    def wait(self, until=inf):
        done = self.ranks[0].wait(until)
        if done is None:
            return None
        other = self.ranks[1].wait()
        assert (done.step, done.tokens, done.ended, done.logprobs) == (
            other.step,
            other.tokens,
            other.ended,
            other.logprobs,
        )
        for id, tokens in done.tokens.items():
            self.tokens.setdefault(id, []).extend(tokens)
        return done

    def close(self):
        self.both(CudaBackend.close)
        self.threads.shutdown()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_team_samples_the_same_tokens(expected, graphs):
    """Random, penalised and logprobs' ones, too; what is captured on first use both ranks capture in the same order."""
    with closing(Pair(tiny("llama"), graphs=graphs)) as backend:
        seen = serve_all(backend)
        if graphs:
            first, second = (list(rank._graphs._captured) for rank in backend.ranks)
            assert first == second
            assert {picking for _, picking in first} == {Picking.GREEDY, Picking.DRAWN, None}
    assert backend.tokens == expected
    assert "recompute" in seen.events
