"""Chunks that shrink as a prompt goes on (Sarathi-Serve), and chunks that fit the decodes' deadlines (Niyama)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Slo
from policies.composed import Composed
from policies.dynamic_chunks import DeadlineChunks, Linear, ProgressChunks, TwoLinear
from tests.policies.scene import Machine, Scene, placed, plan

SMALL = ProgressChunks(low=32, high=128, span=400, levels=4)
"""128, 96, 64, 32 tokens from 0, 100, 200, 300 on."""


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        (SMALL, [128, 128, 96, 96, 64, 64, 32, 32, 32, 32]),
        # 400, 300, 200, 100 in 32s: 12.5 (to the even one), 9.4, 6.25, 3.1.
        (ProgressChunks(low=100, high=400, span=400, levels=4), [384, 384, 288, 288, 192, 192, 96, 96, 96, 96]),
        (ProgressChunks(low=64, high=128, span=400, levels=1), [64] * 10),
        (ProgressChunks(low=5, high=10, span=400, levels=2), [10] * 4 + [5] * 6),  # fives, below 32
    ],
)
def test_sizes_by_progress(budget, sizes):
    assert [budget.size(done) for done in range(0, 500, 50)] == sizes


def test_a_prompt_goes_in_ever_smaller_chunks():
    machine = Machine(Composed(SMALL))
    machine.arrive(prompt=400, output=2)
    assert [machine.turn() for _ in range(7)] == [{0: tokens} for tokens in (128, 96, 64, 64, 32, 16, 1)]


def test_each_prompt_fills_the_step_up_to_its_own_size():
    # 2 decodes. At 300 the size is 32: 30. At 100 it is 96: 64 more. At 0 it is 128: 32 more.
    scene = Scene()
    decodes = [scene.decodes(), scene.decodes()]
    far, near, new = scene.partial(1000, 300), scene.partial(1000, 100), scene.waits(prompt=500)
    expected = {decode.id: 1 for decode in decodes} | {far.id: 30, near.id: 64, new.id: 32}
    assert placed(plan(Composed(SMALL), scene)) == expected


def test_a_prompt_that_is_far_leaves_the_step_to_others_once_it_is_full_for_it():
    # The first takes 96; at 350 the size is 32, and so many are placed already.
    scene = Scene()
    near, far = scene.partial(1000, 100), scene.partial(1000, 350)
    assert placed(plan(Composed(SMALL), scene)) == {near.id: 96}
    assert far.remaining == 650


@given(
    st.integers(1, 200),
    st.integers(0, 300),
    st.integers(1, 500),
    st.integers(1, 9),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_sizes_never_grow_and_stay_between_their_ends(low, more, span, levels, one, other):
    budget = ProgressChunks(low, low + more, span, levels)
    first, later = (budget.size(done) for done in sorted((one, other)))
    assert 1 <= later <= first <= low + more + 16


@pytest.mark.parametrize("option", ["low", "span", "levels"])
def test_refuses_nothing(option):
    with pytest.raises(ValueError, match=rf"policy\.budget\.{option}=0 must be at least 1"):
        ProgressChunks(**{option: 0})


def test_refuses_ends_the_wrong_way_round():
    with pytest.raises(ValueError, match=r"policy\.budget\.high=64 must be at least policy\.budget\.low=512"):
        ProgressChunks(high=64)


# --- by deadlines. It is 10.0 in every scene; a step takes 1 ms a prompt token, unless said otherwise.

BY_TOKENS = Linear(0.0, 0.001, 0.0, 0.0, 0.0)


def niyama(time=BY_TOKENS, **more):
    return Composed(DeadlineChunks(time, **more))


def scene_with(slo: Slo, first_token=None, prompt=5000, **more) -> Scene:
    """A decode that came at 9.0 and has 8 tokens, and a prompt."""
    scene = Scene(blocks=4000, **more)
    scene.decodes(returned=8, arrival=9.0, slo=slo).first_token = first_token
    scene.waits(prompt=prompt)
    return scene


@pytest.mark.parametrize(
    ("slo", "first_token", "tokens"),
    [
        # Due at 9.0 + 0.5 + 9 * 0.1 = 10.4. 0.4 s / 1.2: 333 tokens, so 256 with the decode.
        (Slo(0.5, 0.1), None, 255),
        # Its first token was late: due at 9.8 + 0.9 = 10.7, 583 tokens, 512. Early (9.2): as before.
        (Slo(0.5, 0.1), 9.8, 511),
        (Slo(0.5, 0.1), 9.2, 255),
        # Only later tokens have an objective: due at 9.4 + 0.9 = 10.3, 250 tokens.
        (Slo(tpot=0.1), 9.4, 127),
        (Slo(0.1, 0.1), None, 127),  # due now, or late: the smallest
        (Slo(0.1, 0.01), None, 127),
        (Slo(0.5, 1.0), None, 2551),  # 8.5 s: the largest
        (Slo(), None, 2551),
    ],
)
def test_the_step_fits_into_the_slack_of_its_decodes(slo, first_token, tokens):
    assert placed(plan(niyama(), scene_with(slo, first_token))) == {0: 1, 1: tokens}


def test_the_most_urgent_decode_counts():
    scene = scene_with(Slo())
    scene.decodes(returned=8, arrival=9.0, slo=Slo(0.5, 0.1))
    assert placed(plan(niyama(), scene)) == {0: 1, 2: 1, 1: 254}


def test_the_predictor_sees_decodes_and_what_lies_behind():
    seen = []

    def time(*asked):
        seen.append(asked)
        return 0.0

    scene = scene_with(Slo(0.5, 0.1))
    scene.partial(5000, 300)
    plan(niyama(time), scene)
    assert seen == [(2551, 1, 300, 101)]  # the decode has 100 tokens and computes one more


def test_without_much_memory_sizes_are_small():
    # 2000 blocks * 16 // 32 = 1000 tokens, 1999 blocks 999.
    scene = scene_with(Slo())
    scene.fill(scene.rank.pool.free - 2000)
    assert placed(plan(niyama(), scene)) == {0: 1, 1: 2551}
    scene = scene_with(Slo())
    scene.fill(scene.rank.pool.free - 1999)
    assert placed(plan(niyama(), scene)) == {0: 1, 1: 511}
    assert placed(plan(niyama(tight=0), scene)) == {1: 2552}


def test_the_prompt_whose_first_token_is_due_first_goes_on_first():
    # 300 tokens fit; the second is due at 10.5, the first at 12.0. What is left goes to the queue.
    scene = Scene(blocks=4000)
    late, early = (scene.partial(200, 100, arrival=9.0, slo=Slo(ttft)) for ttft in (3.0, 1.5))
    new = scene.waits(prompt=500)
    draft = plan(niyama(sizes=[300]), scene)
    assert list(placed(draft).items()) == [(early.id, 100), (late.id, 100), (new.id, 100)]


def test_two_linear_models():
    # 0.014936 + 512 * (5.882475e-05 + 2.247956e-05) = 0.056564; beyond: 0.005004 + 513 * (2.719050e-05 + 6.863043e-05).
    time = TwoLinear()
    assert time(512, 0, 0, 0) == pytest.approx(0.056564, abs=1e-6)
    assert time(513, 0, 0, 0) == pytest.approx(0.054160, abs=1e-6)
    # Ten decodes with 10000 tokens behind them: 10 * 9.516994e-05 + 10000 * 1.111258e-07.
    assert time(0, 10, 0, 10_000) == pytest.approx(0.014936 + 0.000952 + 0.001111, abs=1e-6)
    assert time(0, 0, 1000, 0) == pytest.approx(0.014936 + 0.000755, abs=1e-6)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"sizes": [256, 128]}, r"sizes=\[256, 128\] must be growing"),
        ({"tight_sizes": []}, r"tight_sizes=\[\] must be growing"),
        ({"margin": 0}, "margin=0 must be above 0"),
        ({"tight": -1}, "tight=-1 must be 0"),
    ],
)
def test_refuses(option, problem):
    with pytest.raises(ValueError, match=rf"policy\.budget\.{problem}"):
        DeadlineChunks(**option)
