"""Replicas by how fast answers have to be, worked by hand."""

from math import inf
from random import Random

import pytest

from playground.core import RequestView, Slo
from playground.policy import ClusterView, Load
from policies.tpot_classes import TpotClasses


def two_classes(**options):
    """Up to 10 requests in the tight class, 40 in the loose one."""
    return TpotClasses((0.02, 0.05), step=0.01, per_decode=0.001, **options)


def view(*running, now=1.0, taken=1.0):
    loads = [Load(rank, 0, count, 0, 100, 100) for rank, count in enumerate(running)]
    return ClusterView(now, taken, loads, Random(0), lambda rank: 0, fresh=now == taken)


def request(tpot):
    return RequestView(0, 0.0, 10, 10, slo=Slo(tpot=tpot))


def sent(tpot, *running):
    return two_classes()(request(tpot), view(*running))


def test_the_most_loaded_that_keeps_its_class_is_filled_first():
    assert sent(0.02, 3, 9, 0, 0) == 1
    assert sent(0.02, 3, 10, 0, 0) == 0  # one more would take 21 ms
    assert sent(0.05, 0, 0, 38, 39) == 3
    assert sent(0.05, 0, 0, 38, 40) == 2


def test_a_looser_one_shares_a_tighter_replica_that_keeps_its_own_pace():
    assert sent(0.05, 9, 3, 40, 40) == 0
    assert sent(0.05, 10, 3, 40, 40) == 1


def test_a_tighter_one_never_goes_to_a_looser_replica():
    assert sent(0.02, 12, 11, 0, 0) == 1  # overloaded, and less so than the other


@pytest.mark.parametrize("running", [0, 5, 11])
def test_equals_take_turns(running):
    route = two_classes()
    assert [route(request(0.02), view(running, running, 0, 0)) for _ in range(4)] == [0, 1, 0, 1]


def test_a_replica_is_full_with_what_it_was_sent_since_the_report():
    # Eight are known of the first, one of the second: two and nine more fill them, and then the less loaded is next.
    known = view(8, 1, 0, 0, now=1.2, taken=1.0)
    route = two_classes()
    assert [route(request(0.02), known) for _ in range(13)] == [0] * 2 + [1] * 9 + [0, 1]
    blind = two_classes(own=False)
    assert [blind(request(0.02), known) for _ in range(13)] == [0] * 13
    assert route(request(0.02), view(9, 0, 0, 0, now=2.2, taken=2.0)) == 0  # the next report has told of them


@pytest.mark.parametrize(("tpot", "place"), [(0.01, 0), (0.02, 0), (0.049, 0), (0.05, 1), (inf, 1)])
def test_a_request_belongs_to_the_last_class_that_is_fast_enough(tpot, place):
    assert two_classes().class_of(tpot) == place


def test_fewer_replicas_than_classes():
    route = TpotClasses((0.02, 0.05, 0.1))
    for tpot in (0.02, 0.05, 0.1, inf):
        assert route(request(tpot), view(0)) == 0


def test_waiting_requests_count_as_well():
    loads = [Load(0, 8, 2, 0, 100, 100), Load(1, 0, 0, 0, 100, 100)]
    waiting = ClusterView(1.0, 1.0, loads, Random(0), lambda rank: 0)
    assert TpotClasses((0.02,), step=0.01, per_decode=0.001)(request(inf), waiting) == 1


@pytest.mark.parametrize("classes", [[], [0.0, 0.1], [0.05, 0.02], [0.02, 0.02]])
def test_classes_rise(classes):
    with pytest.raises(ValueError, match=r"policy.route.classes=\[.*\] must be rising objectives above 0"):
        TpotClasses(classes)


def test_a_step_takes_no_less_than_nothing():
    with pytest.raises(ValueError, match=r"policy.route.step=-1 must be 0 or more seconds"):
        TpotClasses(step=-1)
