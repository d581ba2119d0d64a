"""The most memory that will ever be needed at once, worked by hand and as a law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.future_peak import FuturePeak, fits
from policies.predictors import LogNormal
from tests.policies.scene import Machine, Scene


@pytest.mark.parametrize(("room", "fit"), [(20, True), (19, False)])
def test_the_peak_lies_where_one_of_them_ends(room, fit):
    # (to come, now): after 3 ticks 5 + 3 and 9 + 3 are held, 20; after 8 the first alone holds 13.
    assert fits([(8, 5), (3, 9)], room) is fit


@pytest.mark.parametrize(("room", "fit"), [(30, True), (29, False)])
def test_those_that_end_together_peak_together(room, fit):
    # 3 x 5 to come, 4 + 5 + 6 now.
    assert fits([(5, 4), (5, 5), (5, 6)], room) is fit


@pytest.mark.parametrize(("blocks", "admitted"), [(38, True), (37, False)])
def test_a_new_prompt_starts_if_the_peak_fits(blocks, admitted):
    # Blocks of one token. Running: 10 of KV (11 known), 20 of 30 to come. New: prompt of 9 (8 have KV before its first
    # token's step ends, so to say), 10 to come. After 10 ticks: 10 + 10 and 8 + 10 = 38; after 20 the first alone: 30.
    scene = Scene(blocks=blocks, block_size=1)
    scene.decodes(10, returned=10, max_tokens=30)
    waiting = scene.waits(prompt=9, max_tokens=10)
    assert FuturePeak()(scene.draft(), waiting, 9) is admitted


def test_a_shorter_prediction_lets_more_in():
    scene = Scene(blocks=37, block_size=1)
    scene.decodes(10, returned=10, max_tokens=30)
    waiting = scene.waits(prompt=9, max_tokens=10)
    # 15 and 5 tokens: 5 to come of each. 15 + 13 = 28.
    assert FuturePeak(LogNormal(bias=0.5))(scene.draft(), waiting, 9)


def test_whoever_outlives_its_prediction_ends_with_its_next_token():
    # 10 of KV and one token more: 11; the new one holds 9 then, and 18 in the end.
    scene = Scene(blocks=20, block_size=1)
    scene.decodes(10, returned=10, max_tokens=30)
    waiting = scene.waits(prompt=9, max_tokens=10)
    assert FuturePeak(LogNormal(bias=1 / 3))(scene.draft(), waiting, 9)
    scene = Scene(blocks=19, block_size=1)
    scene.decodes(10, returned=10, max_tokens=30)
    waiting = scene.waits(prompt=9, max_tokens=10)
    assert not FuturePeak(LogNormal(bias=1 / 3))(scene.draft(), waiting, 9)


def test_what_is_not_free_now_is_no_room():
    scene = Scene(blocks=38, block_size=1)
    scene.decodes(10, returned=10, max_tokens=30)
    waiting = scene.waits(prompt=9, max_tokens=10)
    scene.fill(20)  # 8 are free
    assert not FuturePeak()(scene.draft(), waiting, 9)


def test_a_last_block_may_be_all_but_empty():
    # Blocks of 16: 1 + 15 and 1 + 15 tokens now, 2 to come of each: 2 x (16 + 2) = 36 of 48 tokens; 32 are too few.
    for blocks, admitted in ((3, True), (2, False)):
        scene = Scene(blocks=blocks)
        scene.decodes(1, max_tokens=3)
        waiting = scene.waits(prompt=2, max_tokens=2)
        assert FuturePeak()(scene.draft(), waiting, 2) is admitted


def test_prompts_in_progress_take_what_they_still_need():
    # 10 blocks free, 6 of them owed to 160 tokens of which 64 are computed; 5 wanted.
    scene = Scene(blocks=100)
    scene.partial(160, 64, max_tokens=2)
    waiting = scene.waits(prompt=80, max_tokens=2)
    scene.fill(scene.rank.pool.free - 10)
    assert not FuturePeak()(scene.draft(), waiting, 80)
    scene.frees(1)
    assert FuturePeak()(scene.draft(), waiting, 80)


SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=12)


@given(SHAPES, st.sampled_from([1, 4]), st.integers(0, 5))
def test_with_true_lengths_nobody_is_ever_preempted(shapes, size, gap):
    """MC-SF's invariant: prompts are computed in one step, and all decode in every step."""
    policy = Composed(ChunkedPrefill(10_000), admission=FuturePeak())
    machine = Machine(policy, blocks=160 // size, block_size=size, max_tokens=10_000)
    for prompt, output in shapes:
        machine.arrive(prompt, output)
        for _ in range(gap):
            machine.turn()
    for _ in range(500):
        machine.turn()
    assert not machine.scheduler.live
    assert machine.preempted == []
