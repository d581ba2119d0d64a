"""Weighted placement; DynaPipe's rule and what moves cost are in tests/playground/test_sim_cluster_migration.py."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Spec
from playground.draft import Draft
from playground.rank import Rank
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.placement import Weighted


def chosen(rule, layers, spare=2, now=None):
    spec = Spec(blocks=10, stages=len(layers), layers=layers, spare_layers=spare)
    return rule(Draft(Rank(0, spec, False, True), spec, 0.0, Random(0), (), 1, now or layers))


def test_layers_in_proportion_to_speed():
    # 12 layers over speeds 3, 2, 1 are 6, 4, 2: two each.
    assert chosen(Weighted((3, 2, 1)), (4, 4, 4)) == (6, 4, 2)


def test_no_stage_takes_more_than_it_has_room_for():
    # One more than 4 at most: the other two share 7 as 4.67 to 2.33, and 5 / 2 < 3 / 1.
    assert chosen(Weighted((3, 2, 1)), (4, 4, 4), spare=1) == (5, 5, 2)


def test_the_last_stage_also_samples():
    # 12 layers and a head of 4 are 16: four for each of four stages, the last of which has no layer but one.
    assert chosen(Weighted(head=4), (3, 3, 3, 3)) == (4, 4, 3, 1)


def test_layers_alike_are_left_alone_and_who_is_placed_stays():
    assert chosen(Weighted(), (3, 3, 3)) is None
    assert chosen(Weighted(), (3, 3, 4)) is None
    assert chosen(Weighted((3, 2, 1)), (4, 4, 4), now=(6, 4, 2)) is None


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=2, max_size=3),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_no_placement_has_a_faster_slowest_stage(stages, spare, head):
    layers, speeds = zip(*stages, strict=True)
    rooms = [range(1, count + spare + 1) for count in layers]

    def slowest(cut):
        return max((n + head * (i == len(cut) - 1)) / speeds[i] for i, n in enumerate(cut))

    best = min(slowest(cut) for cut in product(*rooms) if sum(cut) == sum(layers))
    found = chosen(Weighted(speeds, head), layers, spare) or layers
    assert sum(found) == sum(layers)
    assert slowest(found) == best


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Weighted((1, 0)), r"policy.placement.speeds=\[1, 0\] must all be more than 0"),
        (lambda: Weighted(head=-1), r"policy.placement.head=-1 must be 0 or more layers"),
        (
            lambda: Weighted((1, 2, 3)).check(Spec(9, stages=2, layers=(2, 2), spare_layers=1)),
            r"policy.placement.speeds=\[1, 2, 3\] are 3 stages: name one for each of the 2",
        ),
        (
            lambda: Composed(ChunkedPrefill(), placement=Weighted()).run_ahead(Spec(9)),
            r"policy.placement=weighted: no stage has room for another's layers; set parallel.spare_layers",
        ),
    ],
)
def test_placements_that_cannot_be_say_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()
