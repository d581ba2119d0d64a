"""Dynamic SplitFuse: steps of exactly one size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import FullPrompt
from policies.composed import Composed
from policies.exact_fill import ExactFill
from tests.policies.scene import Machine, Scene, placed, plan


def splitfuse(tokens):
    return Composed(ExactFill(tokens), admission=FullPrompt())


def test_long_prompts_are_cut_and_short_ones_put_together():
    # 100 a step. 2 decodes + the rest of a prompt (40) + 30 + 28 of the next one's 50.
    scene = Scene()
    decodes = [scene.decodes(), scene.decodes()]
    partial = scene.partial(200, 160)
    short, cut, _ = (scene.waits(prompt=tokens) for tokens in (30, 50, 5))
    draft = plan(splitfuse(100), scene)
    assert placed(draft) == {decode.id: 1 for decode in decodes} | {partial.id: 40, short.id: 30, cut.id: 28}
    assert draft.tokens == 100


def test_decodes_beyond_the_size_take_turns():
    machine = Machine(splitfuse(4))
    machine.arrive(prompt=1, output=3, count=6)
    assert machine.turn() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert machine.turn() == {0: 1, 1: 1, 2: 1, 3: 1}  # four decode: nothing is left for the other prompts
    assert machine.turn() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert machine.turn() == {4: 1, 5: 1}


def test_of_too_many_decodes_those_served_longest_ago_are_next():
    scene = Scene()
    for step in (9, 5, 6, 8, 7):
        scene.decodes().step = step
    assert list(placed(plan(splitfuse(3), scene))) == [1, 2, 4]


@given(
    st.integers(0, 12),
    st.lists(st.integers(1, 90), max_size=8),
    st.lists(st.integers(2, 90), max_size=2),
    st.integers(1, 80),
)
def test_a_step_has_that_size_as_long_as_there_is_so_much_to_do(decodes, prompts, partial, tokens):
    scene = Scene()
    for _ in range(decodes):
        scene.decodes()
    for length in partial:
        scene.partial(length, length // 2)
    for length in prompts:
        scene.waits(prompt=length)
    work = decodes + sum(prompts) + sum(length - length // 2 for length in partial)
    assert plan(splitfuse(tokens), scene).tokens == min(tokens, work)


def test_refuses():
    with pytest.raises(ValueError, match=r"policy\.budget\.tokens=0 must be at least 1"):
        ExactFill(0)
