"""Sarathi-Serve: decodes first, then chunks of admitted prompts, then new ones."""

from policies.admission import FullPrompt
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from tests.policies.scene import Machine, Scene, placed, plan, victims


def sarathi(tokens=512, watermark=0.01):
    return Composed(ChunkedPrefill(tokens), admission=FullPrompt(watermark))


def test_all_decodes_come_first_then_the_chunk_fills_the_budget():
    # 512 - 3 decodes = 509 of the prompt's remaining 700, though it was admitted before two of them.
    scene = Scene()
    first, prompt, second, third = scene.decodes(), scene.partial(1000, 300), scene.decodes(), scene.decodes()
    scene.waits()
    draft = plan(sarathi(), scene)
    assert placed(draft) == {first.id: 1, second.id: 1, third.id: 1, prompt.id: 509}
    assert draft.tokens == 512


def test_admitted_prompts_go_on_before_new_ones_start():
    # 512 - 1 - 400 = 111 for the queue: 60, then 51 of 200; nothing is left for the last.
    scene = Scene()
    decode, partial = scene.decodes(), scene.partial(1000, 600)
    new = [scene.waits(prompt=tokens) for tokens in (60, 200, 10)]
    assert placed(plan(sarathi(), scene)) == {decode.id: 1, partial.id: 400, new[0].id: 60, new[1].id: 51}


def test_decodes_are_never_held_back_for_the_budget():
    scene = Scene()
    scene.partial(1000, 300), scene.waits()
    decodes = [scene.decodes() for _ in range(6)]
    assert placed(plan(sarathi(tokens=4), scene)) == {sequence.id: 1 for sequence in decodes}


def test_a_prompt_starts_only_if_all_of_it_fits():
    # 1600 tokens: 100 blocks, and int(0.01 * 1000) = 10 stay. Its first chunk alone would need 32.
    for free, expected in ((110, {0: 1, 1: 511}), (109, {0: 1})):
        scene = Scene()
        scene.decodes()
        scene.waits(prompt=1600)
        scene.fill(scene.rank.pool.free - free)
        assert placed(plan(sarathi(), scene)) == expected


def test_a_decode_without_a_block_takes_the_last_arrived_prompts():
    scene = Scene(blocks=100)
    decode, prompt = scene.decodes(160), scene.partial(1000, 160)
    scene.fill(80)
    draft = plan(sarathi(), scene)
    assert (placed(draft), victims(draft)) == ({decode.id: 1}, [prompt.id])


def test_several_steps():
    # 512 a step. Request 0 ends with its third token, in the fourth step.
    machine = Machine(sarathi())
    machine.arrive(prompt=1000, output=3)
    machine.arrive(prompt=300, output=3)
    assert machine.turn() == {0: 512}
    assert machine.turn() == {0: 488, 1: 24}
    assert machine.turn() == {0: 1, 1: 276}
    assert machine.turn() == {0: 1, 1: 1}
    assert machine.turn() == {1: 1}
    assert machine.turn() == {}


def test_decodes_clump_in_a_pipeline():
    # What token throttling mends: all that are ready go into one micro-batch, the other stages get none.
    machine = Machine(sarathi(), stages=4)
    machine.arrive(prompt=64, output=9, count=8)
    assert machine.step() == dict.fromkeys(range(8), 64)
    assert machine.step() == {}
    machine.back()
    assert machine.step() == dict.fromkeys(range(8), 1)
    assert machine.step() == {}
