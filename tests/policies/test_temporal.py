"""TD-Pipe: a phase of prompts, a phase of decodes, and when one gives way to the other."""

import pytest

from policies.composed import Composed
from policies.temporal import TemporalPhases
from tests.policies.scene import Machine, Scene, placed, plan


def td_pipe(**options):
    return Composed(TemporalPhases(**options))


def test_prompts_until_nobody_waits_then_decodes():
    # A step takes whole prompts until it has 100 tokens.
    machine = Machine(td_pipe(batch=100))
    machine.arrive(prompt=60, output=3, count=4)
    assert machine.turn() == {0: 60, 1: 60}
    assert machine.turn() == {2: 60, 3: 60}
    assert machine.turn() == dict.fromkeys(range(4), 1)


def test_prompts_until_the_answers_will_fill_the_pool():
    # 64 tokens may be sampled: 63 are left after the first, so the furthest horizon is 32: ceil(161 / 16) + 32 / 16, 13
    # blocks each, of which seven reach 0.9 * 100. Though 30 blocks are free, decodes are next.
    machine = Machine(td_pipe(batch=100), blocks=100)
    machine.arrive(prompt=160, output=64, count=9)
    assert [machine.turn() for _ in range(7)] == [{id: 160} for id in range(7)]
    assert machine.turn() == dict.fromkeys(range(7), 1)
    # One stage has no bubble, so the next question is answered with prompts: one more step of them.
    assert machine.turn() == {7: 160}


def test_prompts_until_the_next_does_not_fit():
    # One token each: no horizon is foreseen. Ten blocks of 16 hold two prompts of 70 tokens.
    machine = Machine(td_pipe(batch=50), blocks=10)
    machine.arrive(prompt=70, output=2, count=3)
    assert [machine.turn() for _ in range(3)] == [{0: 70}, {1: 70}, {0: 1, 1: 1}]
    assert machine.turn() == {2: 70}


@pytest.mark.parametrize(("decodes", "prefills"), [(100, True), (122, True), (126, False), (384, False)])
def test_prompts_are_next_when_they_use_more_of_the_devices(decodes, prefills):
    # t(n) = max(1, n / 100): (b / 1) / (256 / 2.56) = b / 100 for b <= 100 decodes in a micro-batch.
    # The prompt takes 4 s over two stages: on its way 4 + 4 half-seconds, of which (4 - 1) are a bubble: 5/8 = 0.625.
    # 61 and 50 are below, 63 is above; 192 are always enough.
    scene = Scene(blocks=8000, max_seqs=500, stages=2)
    for _ in range(decodes):
        scene.decodes()
    prompt = scene.waits(prompt=400)
    scene.ordinal = 1  # it asks in even steps
    draft = plan(td_pipe(floor=1.0, per_token=0.01), scene)
    assert (placed(draft) == {prompt.id: 400}) is prefills


@pytest.mark.parametrize(("decodes", "prefills"), [(191, True), (192, False)])
def test_a_full_micro_batch_is_not_interrupted(decodes, prefills):
    # By their time, 3 s for 192 as for 256, they would use three quarters of the device.
    scene = Scene(blocks=8000, max_seqs=500)
    for _ in range(decodes):
        scene.decodes()
    prompt = scene.waits(prompt=400)
    draft = plan(td_pipe(floor=3.0, per_token=0.01), scene)
    assert (placed(draft) == {prompt.id: 400}) is prefills


def test_it_asks_once_in_as_many_steps_as_stages():
    scene = Scene(stages=2)
    decode = scene.decodes()
    scene.waits(prompt=400)
    assert placed(plan(td_pipe(), scene)) == {decode.id: 1}


def test_nothing_to_decode_is_reason_enough_at_once():
    scene = Scene(stages=2)
    prompts = scene.waits(prompt=60), scene.waits(prompt=60)
    assert placed(plan(td_pipe(), scene)) == {prompt.id: 60 for prompt in prompts}


def test_a_prefill_phase_does_not_ask_what_decodes_would_use():
    # On one stage prompts cause no bubble: they interrupt decodes, and go on until nobody waits.
    machine = Machine(td_pipe(batch=50))
    machine.arrive(prompt=60, output=9)
    machine.turn(), machine.turn()
    machine.arrive(prompt=60, output=9, count=2)
    assert [machine.turn() for _ in range(3)] == [{1: 60}, {2: 60}, {0: 1, 1: 1, 2: 1}]


@pytest.mark.parametrize(("ordinal", "rows"), [(4, 2), (5, 1), (6, 1), (7, 1), (8, 2)])
def test_micro_batches_are_even_and_the_remainder_takes_turns(ordinal, rows):
    # 5 decodes on 4 stages: 1 each, and one more in one step of four. It is taken from whoever is ready.
    scene = Scene(stages=4)
    for _ in range(5):
        scene.decodes()
    scene.ordinal = ordinal - 1
    assert len(placed(plan(td_pipe(), scene))) == rows


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"full": 1.5}, r"full=1\.5 must lie in"),
        ({"floor": 0.0}, r"floor=0\.0 must be more"),
        ({"per_token": 0.0}, r"per_token=0\.0 must be more"),
    ],
)
def test_refuses(option, problem):
    with pytest.raises(ValueError, match=rf"policy\.budget\.{problem}"):
        TemporalPhases(**option)
