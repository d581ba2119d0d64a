"""Layers that move between stages while sequences are served: tokens stay those of one rank, and decisions replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from math import nan

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow.parquet import read_table
from torch import Tensor

from engine.config import read_config
from engine.errors import EngineError
from engine.kv import KvPool
from engine.models.decoder import WHOLE, Decoder, Inputs
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.hops import hops
from engine.parallel.layout import Layout
from engine.parallel.moving import Link, Mover, receive_layer, send_layer
from engine.parts import tensors
from engine.tiny import tiny
from engine.weights import read_weights
from kernels.batch import PagedBatch
from kernels.registry import select
from playground.check.parity import replay
from playground.check.recording import load
from playground.core import Spec
from playground.draft import Draft
from tests.engine.parallel.forked import forked
from tests.engine.parallel.layouts import COUNT, LAYOUTS, SIZES, Case, Crew, difference, made
from tests.parity.runs import fresh, record

Cut = tuple[int, ...]


@dataclass
class Restless:
    """A placement that goes through cuts by turns, another one at every `every`th step."""

    cuts: Sequence[Cut]
    every: int = 3

    def check(self, spec: Spec) -> None: ...

    def __call__(self, draft: Draft) -> Cut | None:
        turn, rest = divmod(draft.ordinal, self.every)
        return None if rest else self.cuts[turn % len(self.cuts)]


def restless(case: Case, cuts: Sequence[Cut]):
    return replace(made(case), placement=Restless(cuts))


def moving(layout: Layout, spare: int, model: str, folder) -> Crew:
    config = WorkerConfig(
        str(tiny(model)), replace(layout, spare_layers=spare), f"file://{folder / 'meet'}", sizes=SIZES
    )
    return Crew(ParallelBackend(config, forked(layout.ranks)))


def recorded(workers: Crew, model: str, case: Case, cuts: Sequence[Cut], folder) -> int:
    """Served, compared with one rank, and played again; how often layers moved."""
    turn, asked = workers.turn(case)
    scheduler = record(folder / str(workers.cases), restless(case, cuts), turn, asked)
    assert not difference(model, case, workers.served(turn, asked))
    recording = load(folder / str(workers.cases))
    again = fresh(recording.spec, restless(case, cuts))
    assert replay(recording, again).requests == COUNT
    assert [group.layers for group in again.groups] == [group.layers for group in scheduler.groups]
    events = read_table(folder / str(workers.cases) / "events.parquet")
    return events.column("kind").to_pylist().count("layers")


TIGHT, SWAP = Case("vllm_v1", "tight"), Case("token_throttling", "swap")


@pytest.mark.parametrize(
    ("layout", "model", "spare", "cuts", "cases"),
    [
        ("tp2_pp2_uneven", "deepseek-v3", 2, [(3, 1), (1, 3), (2, 2)], [TIGHT, SWAP]),
        ("pp3", "qwen3-moe", 1, [(1, 1, 2), (2, 1, 1), (1, 2, 1)], [TIGHT, SWAP]),
        pytest.param("pp2", "qwen2", 1, [(3, 1), (2, 2), (1, 3)], [TIGHT, SWAP], marks=pytest.mark.product),
        pytest.param("tp2_pp2", "deepseek-v2", 1, [(3, 1), (2, 2), (1, 3)], [TIGHT, SWAP], marks=pytest.mark.product),
        pytest.param("pp2_dp2", "llama", 1, [(3, 1), (1, 3)], [TIGHT, SWAP], marks=pytest.mark.product),
        pytest.param("dpa2_pp2_ep2", "qwen2-moe", 1, [(3, 1), (1, 3)], [TIGHT], marks=pytest.mark.product),
    ],
    ids=["tp2_pp2_uneven", "pp3", "pp2", "tp2_pp2", "pp2_dp2", "dpa2_pp2_ep2"],
)
def test_tokens_stay_when_layers_move(layout, model, spare, cuts, cases, tmp_path):
    """In both directions, through a stage between, several at once; prompts are cut, and sequences give way."""
    with closing(moving(LAYOUTS[layout], spare, model, tmp_path)) as workers:
        assert (workers.backend.spec.layers, workers.backend.spec.spare_layers) == (LAYOUTS[layout].cut(4), spare)
        assert all(recorded(workers, model, case, cuts, tmp_path) > 5 for case in cases)


# --- in which order layers cross


@st.composite
def crossings(draw):
    """(before, after, room): two cuts of the same layers, and what each stage can hold."""
    count = draw(st.integers(2, 5))
    cuts = st.lists(st.integers(1, 4), min_size=count, max_size=count)
    before, after = draw(cuts), draw(cuts)
    while sum(after) > sum(before):
        after[after.index(max(after))] -= 1
    after[-1] += sum(before) - sum(after)
    spare = st.integers(0, 2)
    return before, after, [max(pair) + draw(spare) for pair in zip(before, after, strict=True)]


@given(crossings())
@example(([1, 1, 4], [4, 1, 1], [4, 2, 4]))  # the stage between is empty on the way, unless it waits for its next
@example(([4, 1, 1], [1, 1, 4], [4, 2, 4]))
def test_layers_cross_in_order_and_find_room_on_the_way(crossing):
    """No more of them cross than must, and every layer arrives where its number says."""
    before, after, room = crossing
    numbers = iter(range(sum(before)))
    stages = [[next(numbers) for _ in range(count)] for count in before]
    made = hops(before, after, room)
    for hop in made:
        assert abs(hop.source - hop.target) == 1
        layer = stages[hop.source].pop(-1 if hop.onward else 0)
        stages[hop.target].insert(0 if hop.onward else len(stages[hop.target]), layer)
        assert all(len(held) <= most for held, most in zip(stages, room, strict=True))
    assert [len(held) for held in stages] == after and list(chain(*stages)) == list(range(sum(before)))
    edges = zip(accumulate(before), accumulate(after), strict=True)
    assert len(made) == sum(abs(old - new) for old, new in edges)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ((4, 0), r"layers=\[4, 0\] leaves stage 1 without layers; leave it one at least"),
        ((1, 3), r"layers=\[1, 3\]: stage 1 has room for 2; raise parallel.spare_layers, or move fewer"),
        ((3, 2), r"layers=\[3, 2\]: 2 stages hold 4 layers; deal out those"),
        ((2, 1, 1), r"layers=\[2, 1, 1\]: 2 stages hold 4 layers; deal out those"),
    ],
)
def test_what_no_stage_can_do(after, told):
    with pytest.raises(EngineError, match=told):
        hops((2, 2), after, (3, 2))


@pytest.mark.parametrize(("stages", "spare"), [(2, -1), (1, 1)])
def test_a_layout_without_room_to_move(stages, spare):
    with pytest.raises(EngineError, match=rf"parallel.spare_layers={spare} must be 0, or more with parallel.stages of"):
        Layout(stages=stages, spare_layers=spare)


# --- what a layer is


@pytest.mark.parametrize("model", ["qwen3", "qwen2-moe", "deepseek-v3"])
def test_a_decoder_gives_up_layers_and_takes_them_in(model):
    """All but one leave and come back, by either end, with their windows; the pool's places are others by then."""
    folder = tiny(model)
    config = replace(read_config(folder), windows=(None, 3, 5, None))
    part = replace(WHOLE, mover=Mover(0, (4,), 1, {}))
    weights = read_weights(folder, config.shape, torch.float32, "cpu")
    decoder, pool = Decoder(config, weights, select("cpu"), part), KvPool(config.shape, 8, 4, torch.float32, spare=1)
    answers(decoder, pool, 0)
    whole, lengths = answers(decoder, pool, 6), [len(pool.layers)]
    for first in (True, False):
        away = [(*decoder.give(first), pool.data[pool.give(first)].clone()) for _ in range(3)]
        lengths.append(len(pool.layers))
        pool.data[pool._free].fill_(nan)
        for layer, window, kv in reversed(away):
            decoder.take(layer, window, first)
            pool.data[pool.take(first)] = kv
    assert lengths == [4, 1, 1] and len(pool.layers) == 4
    assert torch.equal(answers(decoder, pool, 6), whole)


def answers(decoder: Decoder, pool: KvPool, start: int) -> Tensor:
    """Logits of eight tokens of a sequence, of which those before `start` have been computed."""
    count = 8 - start
    tokens, positions = torch.arange(9, 17)[start:], torch.arange(start, 8)
    tables = torch.tensor([[3, 1]])
    slots = tables[0, positions // 4] * 4 + positions % 4
    inputs = Inputs(tokens, positions, slots, torch.tensor([count - 1]), PagedBatch([start], [count], tables, 4))
    with torch.inference_mode():
        return decoder(inputs, pool)


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen2-moe", "deepseek-v2", "deepseek-v3"])
def test_a_layer_is_built_again_from_its_tensors(model):
    folder = tiny(model)
    layers = read_weights(folder, read_config(folder).shape, torch.float32, "cpu").layers
    for layer in layers:
        wire = Wire()
        send_layer(wire, layer, 7)
        again, window = receive_layer(wire, torch.device("cpu"))
        assert window == 7 and not wire.sent
        flat, same = dict(tensors(layer)), dict(tensors(again))
        assert flat.keys() == same.keys() and all(torch.equal(flat[name], same[name]) for name in flat)
        assert all(type(getattr(layer, field.name)) is type(getattr(again, field.name)) for field in fields(layer))


def test_what_does_not_lie_in_one_piece_is_sent_in_several(monkeypatch):
    """As the host's pool on a GPU's host: [layers, blocks, ...] of what lies there block by block."""
    sent = deque()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "send", lambda x, rank: sent.append(x.clone()))
    monkeypatch.setattr(dist, "recv", lambda x, rank: x.copy_(sent.popleft()))
    monkeypatch.setattr("engine.parallel.moving.PIECE", 64)
    link, there = Link(1, torch.device("cpu")), torch.zeros(9, 2, 4)
    source, target = torch.arange(72.0).view(9, 2, 4).transpose(0, 1)[1], there.transpose(0, 1)[1]
    link.send(source)
    assert [piece.nbytes for piece in sent] == [64, 64, 16] and all(piece.is_contiguous() for piece in sent)
    link.receive(target)
    assert torch.equal(target, source) and not there[:, 0].any()
    link.send(source[:0])
    link.receive(target[:0])
    assert not sent


class Wire(Link):
    """What is sent waits here until it is received."""

    def __init__(self):
        self._device = torch.device("cpu")
        self.sent = deque()

    def send(self, x):
        self.sent.append(x.clone())

    def receive(self, x):
        x.copy_(self.sent.popleft())
