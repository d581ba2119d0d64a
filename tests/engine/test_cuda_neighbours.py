"""Who meets whom between a pipeline's stages, and what travels in pieces; the exchange itself needs GPUs."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from engine.cuda import neighbour
from engine.errors import EngineError
from engine.parallel.config import WorkerConfig
from engine.parallel.layout import Layout
from engine.parallel.worker import Seat, _device

CPU = torch.device("cpu")


class Ring:
    """A list of messages that both ranks of a group have."""

    messages: ClassVar = defaultdict(deque)

    def __init__(self, group, rank, device, capacity):
        self.end, self.capacity, self.sent = rank, capacity, self.messages[group]

    def put(self, x):
        assert self.end == 0 and x.is_contiguous() and x.nbytes <= self.capacity
        self.sent.append(x.clone())

    def take(self, like):
        assert self.end == 1
        return like.copy_(self.sent.popleft())


@pytest.fixture
def groups(monkeypatch):
    """The groups that ranks have made; one of two ranks is its ranks."""
    made = []

    def new_group(ranks, timeout, backend):
        made.append((tuple(ranks), backend))
        return tuple(ranks)

    monkeypatch.setattr(neighbour, "dist", SimpleNamespace(new_group=new_group))
    monkeypatch.setattr(neighbour, "Ring", Ring)
    Ring.messages.clear()
    return made


def test_every_rank_meets_its_own_share_of_the_next_stage(groups):
    layout = Layout(stages=3, tp=2, replicas=2)
    met, made = [], []
    for rank in range(layout.ranks):
        met.append(neighbour.neighbours(layout, rank, CPU, 1.0, shared=True))
        made.append(groups[:])
        groups.clear()
    assert made[0] == made[-1] and all(each == made[0] for each in made)  # or they would wait for one another
    assert len(set(made[0])) == len(made[0]) == 8
    for rank, (_, after) in enumerate(met):
        place = layout.place(rank)
        assert (after is None) == (place.stage == 2)
        if after is not None:
            after.send(torch.full((2, 3), float(rank)))
    for rank, (before, _) in enumerate(met):
        place = layout.place(rank)
        assert (before is None) == (place.stage == 0)
        if before is not None:
            sender = layout.rank(place._replace(stage=place.stage - 1))
            assert before.receive(torch.empty(2, 3)).tolist() == [[sender] * 3] * 2


def test_large_messages_travel_in_pieces(groups, monkeypatch):
    monkeypatch.setattr(neighbour, "PIECE", 100)
    ends = [neighbour.neighbours(Layout(stages=2), rank, CPU, 1.0, shared=True) for rank in range(2)]
    (_, after), (before, _) = ends
    for rows in (1, 8, 9, 30):
        x = torch.randn(rows, 3)
        after.send(x)
        assert torch.equal(before.receive(torch.empty(rows, 3)), x)
    after.send(torch.randn(9, 3))
    assert len(Ring.messages[0, 1]) == 2  # of 8 rows with 12 bytes each


def test_ranks_on_gpus(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for count, share, expected in ((2, False, "cuda:1"), (1, True, "cuda:0"), (2, True, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        config = WorkerConfig("x", Layout(tp=2), "file:///x", device="cuda", share_gpus=share)
        assert _device(config, Seat(1, 1, 2)) == expected
    assert chosen == [1, 0, 1]
    for count, share in ((1, False), (0, True)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        config = WorkerConfig("x", Layout(tp=2), "file:///x", device="cuda", share_gpus=share)
        with pytest.raises(EngineError, match=f"^parallel: 2 ranks on a host with {count} GPUs; take fewer ranks, or"):
            _device(config, Seat(1, 1, 2))
