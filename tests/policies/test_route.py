from random import Random

import pytest

from playground.core import Request, Spec
from playground.policy import ClusterView, Load
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.route import LeastOutstanding, RoundRobin


def view(*loads):
    """(waiting, running) of each rank."""
    ranks = [Load(rank, waiting, running, 0, 100, 100) for rank, (waiting, running) in enumerate(loads)]
    return ClusterView(1.0, 1.0, ranks, Random(0), lambda rank: 0)


REQUEST = Request(0, 0.0, 10, 10).view()


def test_round_robin_takes_turns_whatever_the_load():
    route = RoundRobin()
    busy_first = view((9, 9), (0, 0), (0, 0))
    assert [route(REQUEST, busy_first) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_two_round_robins_do_not_share_their_turn():
    one, other = RoundRobin(), RoundRobin()
    assert (one(REQUEST, view((0, 0), (0, 0))), other(REQUEST, view((0, 0), (0, 0)))) == (0, 0)


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        (((3, 0), (0, 2), (1, 2)), 1),  # 3, 2, 3
        (((0, 9), (5, 3), (0, 9)), 1),  # 9, 8, 9: waiting and running count alike
        (((1, 1), (2, 0), (0, 2)), 0),  # the first among equals
    ],
)
def test_least_outstanding_joins_the_shortest_queue(loads, rank):
    assert LeastOutstanding()(REQUEST, view(*loads)) == rank


def test_a_composed_policy_places_where_its_route_says():
    assert Composed(ChunkedPrefill(), route=LeastOutstanding()).place(REQUEST, view((1, 0), (0, 0))) == 1


def test_overlap_is_how_many_steps_are_outstanding_per_stage():
    assert Composed(ChunkedPrefill()).run_ahead(Spec(100)) == 1
    assert Composed(ChunkedPrefill(), overlap=Overlap(2)).run_ahead(Spec(100)) == 2
    with pytest.raises(ValueError, match=r"policy.overlap.run_ahead=0 must be at least 1"):
        Overlap(0)
