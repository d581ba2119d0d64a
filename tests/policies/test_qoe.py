"""Experience of readers, worked by hand. The clock stands at 10 s, blocks have 16 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Slo
from playground.draft import How
from policies.composed import Composed
from policies.qoe import QoeKnapsack, Reader
from policies.victims import LastArrived
from tests.policies.scene import Scene, placed, plan, victims


def test_a_reader_expects_tokens_at_a_pace_from_the_first_on():
    reader = Reader(3.0, 5.0)
    assert [reader.expects(time) for time in (2.0, 3.0, 5.0)] == [0.0, 0.0, 10.0]


def test_a_reader_with_an_empty_buffer_wins_what_it_reads():
    # Starts at 0, 2 a second, has 20 at 10 s. Until 14: expected - has = 2 (t - 10): 16; served at 4 a second it is all
    # there. Whole: 2 x 14^2 / 2 = 196.
    assert Reader(0.0, 2.0).gain(20, 10.0, 4.0, 14.0) == pytest.approx(16 / 196)


def test_one_that_is_behind_wins_as_fast_as_tokens_come_until_it_has_caught_up():
    # Has 16 of 20. Served at 4 a second it gains 2 a second: level at 12 s, 8 up; then 2 a second.
    # 4 x 2^2 / 2 = 8, and from 12 to 14: from 8 to 12: 20. 28 in all.
    assert Reader(0.0, 2.0).gain(16, 10.0, 4.0, 14.0) == pytest.approx(28 / 196)


def test_one_that_is_ahead_wins_only_once_it_has_read_what_it_has():
    # Has 24: hungry from 12 on. 2 x 2^2 / 2 = 4.
    assert Reader(0.0, 2.0).gain(24, 10.0, 4.0, 14.0) == pytest.approx(4 / 196)
    assert Reader(0.0, 2.0).gain(28, 10.0, 4.0, 14.0) == 0.0


def test_slow_tokens_are_what_one_wins():
    # Empty buffer, but 1 a second: 1 x 4^2 / 2 = 8.
    assert Reader(0.0, 2.0).gain(20, 10.0, 1.0, 14.0) == pytest.approx(8 / 196)
    # Ahead by 2 s (24), served at 1 a second: crossing at (1 x 10 - 2 x 12) / (1 - 2) = 14: 2 (t - 12): 4.
    assert Reader(0.0, 2.0).gain(24, 10.0, 1.0, 14.0) == pytest.approx(4 / 196)


def test_nothing_is_won_before_anything_is_expected():
    assert Reader(20.0, 2.0).gain(0, 10.0, 4.0, 14.0) == 0.0


@given(st.floats(0, 20), st.sampled_from([0.5, 2.0, 5.0]), st.integers(0, 60), st.floats(10, 15), st.floats(0.1, 20))
def test_a_gain_is_a_share_and_the_integral_it_says(start, rate, has, serving, speed):
    reader, end, steps = Reader(start, rate), 20.0, 4000
    gain = reader.gain(has, serving, speed, end)
    assert 0 <= gain <= 1 + 1e-9
    times = [10 + 10 * (i + 0.5) / steps for i in range(steps)]
    area = sum(max(0.0, min(reader.expects(t) - has, speed * (t - serving))) for t in times) * 10 / steps
    whole = rate * max(0.0, end - start) ** 2 / 2
    assert gain * whole == pytest.approx(area, abs=0.05)


# --- decisions

ONE_ROW = dict(step=0.1, per_decode=0.1, rate=5.0)
"""1 / 5 - 0.1 = one row of 0.1 s."""


def reading(scene, returned, arrival=0.0, **more):
    return scene.decodes(100, returned=returned, arrival=arrival, **more)


def test_rows_keep_the_readers_pace():
    # (1 / 5 - 0.005) / 1.1e-4 = 1772; 256 seats.
    assert QoeKnapsack().rows(Scene(max_seqs=4096).draft()) == 1772
    assert QoeKnapsack().rows(Scene().draft()) == 256
    assert QoeKnapsack(**ONE_ROW).rows(Scene().draft()) == 1
    assert QoeKnapsack(step=0.3).rows(Scene().draft()) == 1


def test_who_is_ahead_of_its_reader_pauses_for_who_is_behind():
    # Expected by now: 5 x (10 - 1) = 45 tokens.
    scene = Scene()
    reading(scene, 99)  # enough for 20 s
    behind = reading(scene, 40)
    assert placed(plan(Composed(QoeKnapsack(**ONE_ROW)), scene)) == {behind.id: 1}


def test_a_small_context_is_served_before_a_large_one_that_wins_as_much():
    scene = Scene()
    scene.decodes(1000, returned=40, arrival=0.0)
    small = scene.decodes(100, returned=40, arrival=0.0)
    assert placed(plan(Composed(QoeKnapsack(**ONE_ROW)), scene)) == {small.id: 1}


def test_objectives_of_a_request_are_its_readers():
    scene = Scene()
    knapsack = QoeKnapsack(ttft=1.0, rate=5.0)
    own = scene.waits(arrival=2.0, slo=Slo(ttft=0.5, tpot=0.1))
    assert knapsack.reader(own.request) == Reader(2.5, 10.0)
    assert knapsack.reader(scene.waits(arrival=2.0).request) == Reader(3.0, 5.0)


@pytest.mark.parametrize("how", list(How))
def test_one_that_is_ahead_gives_its_memory_to_one_that_waits(how):
    # 20 blocks, 5 % stay: 19. Two of 7 blocks run, and the new one needs 7: 21.
    scene = Scene(blocks=20, host_blocks=20)
    ahead, behind = reading(scene, 99), reading(scene, 40)
    new = scene.waits(prompt=100, arrival=5.0)
    draft = plan(Composed(QoeKnapsack(), victims=LastArrived(how)), scene)
    assert victims(draft) == [ahead.id] and draft.preempted[0].how is how
    # A copy takes a while: its blocks are not free yet.
    assert placed(draft) == ({behind.id: 1, new.id: 100} if how is How.RECOMPUTE else {behind.id: 1})


def test_nobody_is_preempted_twice_nor_in_vain():
    scene = Scene(blocks=20)
    ahead, behind = reading(scene, 99), reading(scene, 40)
    scene.waits(prompt=100, arrival=5.0)
    ahead.preemptions = 1
    draft = plan(Composed(QoeKnapsack()), scene)
    assert victims(draft) == [] and placed(draft) == {behind.id: 1, ahead.id: 1}
    scene = Scene(blocks=20)
    reading(scene, 99), reading(scene, 40)
    scene.waits(prompt=300, arrival=5.0)  # 19 blocks: not beside the one that is behind
    assert victims(plan(Composed(QoeKnapsack()), scene)) == []


def test_nobody_gives_way_if_that_is_not_enough():
    # 30 blocks, 1 stays. 21 are held, and the new one takes 19 of the 8 that are free; the only one that may give way
    # has 7, since the other has done so before.
    scene = Scene(blocks=30)
    spent = reading(scene, 99)
    ids = [spent.id, reading(scene, 99).id, reading(scene, 40).id]
    new = scene.waits(prompt=300, arrival=5.0)
    knapsack = QoeKnapsack()
    assert new in knapsack._packed(scene.draft(), knapsack.ranked(scene.draft(), 256), 256)
    spent.preemptions = 1
    draft = plan(Composed(knapsack), scene)
    assert victims(draft) == [] and sorted(placed(draft)) == ids


def test_nobody_gives_way_while_in_flight():
    scene = Scene(blocks=20)
    ahead = reading(scene, 99)
    reading(scene, 40), scene.waits(prompt=100, arrival=5.0)
    scene.flies(ahead)
    assert victims(plan(Composed(QoeKnapsack()), scene)) == []


def test_where_all_fit_all_are_served():
    scene = Scene()
    ids = [reading(scene, 99).id, reading(scene, 40).id]
    prompt = scene.partial(300, 100, arrival=1.0)
    new = scene.waits(prompt=100, arrival=9.9)
    draft = plan(Composed(QoeKnapsack()), scene)
    assert placed(draft) == {ids[1]: 1, ids[0]: 1, prompt.id: 200, new.id: 100} and victims(draft) == []


def test_it_promises_nothing():
    scene = Scene()
    reading(scene, 40)
    policy = Composed(QoeKnapsack())
    assert policy.steady(plan(policy, scene)) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0}, "policy.budget.rate=0 must be above 0"),
        ({"horizon": -1}, "policy.budget.horizon=-1 must be above 0"),
        ({"ttft": -1}, "policy.budget.ttft=-1 must be 0 or more seconds"),
        ({"tokens": 0}, "policy.budget.tokens=0 must be at least 1"),
        ({"window": 0}, "policy.budget.window=0 must be at least 1"),
        ({"preemptions": -1}, r"policy.budget.preemptions=-1 must be 0 \(never\) or more"),
        ({"reserve": 1.0}, r"policy.budget.reserve=1.0 must lie in \[0, 1\)"),
    ],
)
def test_one_line_says_what_is_wrong(options, said):
    with pytest.raises(ValueError, match=said):
        QoeKnapsack(**options)
