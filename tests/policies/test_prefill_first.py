"""SGLang: prompts in chunks before decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.composed import Composed
from policies.prefill_first import ChunkedPrefillFirst
from tests.policies.scene import Machine, Scene, placed, plan


def sglang(tokens=400, mixed=False):
    return Composed(ChunkedPrefillFirst(tokens, mixed))


def test_prompts_fill_the_step_and_decodes_wait():
    # 300, then 100 of the second's 200; nothing for the third, nor for the decode.
    scene = Scene()
    scene.decodes()
    first, second, _ = (scene.waits(prompt=tokens) for tokens in (300, 200, 50))
    assert placed(plan(sglang(), scene)) == {first.id: 300, second.id: 100}


def test_the_prompt_that_was_cut_goes_on_first_and_alone_until_it_is_done():
    machine = Machine(sglang())
    machine.arrive(prompt=900, output=3)
    machine.arrive(prompt=50, output=3, count=2)
    assert machine.turn() == {0: 400}
    assert machine.turn() == {0: 400}
    assert machine.turn() == {0: 100, 1: 50, 2: 50}
    assert machine.turn() == {0: 1, 1: 1, 2: 1}
    machine.arrive(prompt=50, output=3)
    assert machine.turn() == {3: 50}  # decodes stall


def test_decodes_run_when_no_prompt_can_start():
    # The prompt's 160 tokens need 10 blocks, 9 are free.
    scene = Scene()
    decodes = [scene.decodes(), scene.decodes()]
    scene.waits(prompt=160)
    scene.fill(scene.rank.pool.free - 9)
    assert placed(plan(sglang(), scene)) == {decode.id: 1 for decode in decodes}


def test_mixed_steps_take_the_decodes_tokens_from_the_prompts():
    # 400 - 3 decodes = 397: 300, and 97 of the second.
    scene = Scene()
    decodes = [scene.decodes() for _ in range(3)]
    first, second = scene.waits(prompt=300), scene.waits(prompt=300)
    expected = {first.id: 300, second.id: 97} | {decode.id: 1 for decode in decodes}
    assert placed(plan(sglang(mixed=True), scene)) == expected


def test_mixed_steps_hold_no_decode_back():
    scene = Scene()
    decodes = [scene.decodes() for _ in range(5)]
    scene.waits()
    assert placed(plan(sglang(tokens=4, mixed=True), scene)) == {decode.id: 1 for decode in decodes}


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.integers(1, 3),
    st.integers(8, 40),
)
def test_at_most_one_prompt_is_half_computed(prompts, tokens, mixed, stages, blocks):
    machine = Machine(sglang(tokens, mixed), blocks=blocks, stages=stages)
    for prompt in prompts:
        machine.arrive(prompt, output=3)
    for _ in range(200):
        while machine.step():
            running = machine.scheduler.ranks[0].running.values()
            assert sum(one.remaining > 0 and not one.decoding for one in running) <= 1
        if not machine.flights:
            break
        machine.back()
    assert not machine.scheduler.live


def test_refuses():
    with pytest.raises(ValueError, match=r"policy\.budget\.tokens=0 must be at least 1"):
        ChunkedPrefillFirst(0)
