"""Who meets whom on GPUs, and which way messages go; the exchange itself needs GPUs."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from engine.cuda import neighbour
from engine.cuda.team import NearTeam, in_reach
from engine.errors import EngineError
from engine.parallel.config import WorkerConfig
from engine.parallel.exchange import at_once
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
    assert len(set(made[0])) == len(made[0]) == 12
    for rank, (_, after, _) in enumerate(met):
        place = layout.place(rank)
        assert (after is None) == (place.stage == 2)
        if after is not None:
            after.send(torch.full((2, 3), float(rank)))
    for rank, (before, *_) in enumerate(met):
        place = layout.place(rank)
        assert (before is None) == (place.stage == 0)
        if before is not None:
            sender = layout.rank(place._replace(stage=place.stage - 1))
            assert before.receive(torch.empty(2, 3)).tolist() == [[sender] * 3] * 2
    ends = [rank for rank, (*_, back) in enumerate(met) if back is not None]
    assert [layout.place(rank).stage for rank in ends] == [0, 0, 2, 2] * 2
    for rank in ends[2:4] + ends[6:]:
        met[rank][2].send(torch.full((1, 1), rank))
    for rank in ends[:2] + ends[4:6]:
        place = layout.place(rank)
        assert met[rank][2].receive(torch.empty(1, 1)).item() == layout.rank(place._replace(stage=2))


def test_large_messages_travel_in_pieces(groups, monkeypatch):
    monkeypatch.setattr(neighbour, "PIECE", 100)
    ends = [neighbour.neighbours(Layout(stages=2), rank, CPU, 1.0, shared=True) for rank in range(2)]
    (_, after, _), (before, *_) = ends
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


class Peers:
    """Of a team of two that have the same to give; what they are asked is noted."""

    def __init__(self, capacity):
        self.capacity, self.asked = capacity, []

    def fits(self, nbytes):
        return nbytes <= self.capacity

    def add_sum(self, partial, x):
        self.asked.append("add_sum")
        x.add_(2 * partial)

    def gather(self, x):
        self.asked.append("gather")
        assert x.is_contiguous()
        return torch.cat([x, x], 1)


class Far(Peers):
    rank, size = 1, 2

    def add_sum(self, partial, x):
        super().add_sum(partial, x)
        return lambda: x

    def sum(self, x):
        self.asked.append("sum")
        x.mul_(2)


def test_a_team_exchanges_by_peer_loads_what_fits():
    """And by other ways what does not, with the same result."""
    peers, far, runs = Peers(48), Far(0), []
    team = NearTeam(peers, far, lambda exchange: runs.append(exchange) or at_once(exchange))
    assert (team.rank, team.size) == (1, 2)
    for rows in (2, 3):
        x, partial = torch.ones(rows, 6), torch.full((rows, 6), 2.0)
        assert team.add_sum(partial, x)() is x
        assert (x == 5).all()
        team.sum(x)
        assert (x == 10).all()
        assert team.gather(x.T.reshape(6, rows).T).shape == (rows, 12)
    assert peers.asked == ["add_sum", "add_sum", "gather"]
    assert far.asked == ["add_sum", "sum", "gather"]
    assert len(runs) == 3


def test_gpus_in_reach(monkeypatch):
    links = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in links)
    assert in_reach([0])
    assert in_reach([0, 1])
    assert not in_reach([0, 1, 2])
