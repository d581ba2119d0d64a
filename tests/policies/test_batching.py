"""The older disciplines: static batches, Orca, vLLM v0. Prompts enter whole."""

import pytest

from policies.admission import Always, MaxLength, Watermark
from policies.budget import Orca, PrefillFirst, Static
from policies.composed import Composed
from tests.policies.scene import Machine, Scene, placed, plan, victims

# --- static


def test_a_static_batch_starts_together_and_the_next_when_all_have_ended():
    machine = Machine(Composed(Static(batch=2), admission=MaxLength()))
    machine.arrive(prompt=50, output=2)
    machine.arrive(prompt=60, output=4)
    machine.arrive(prompt=70, output=2)
    assert machine.turn() == {0: 50, 1: 60}
    assert machine.turn() == {0: 1, 1: 1}  # 0 has its 2 tokens
    assert machine.turn() == {1: 1}  # its place stays empty
    assert machine.turn() == {1: 1}
    assert machine.turn() == {2: 70}


def test_a_static_batch_takes_those_that_are_there():
    machine = Machine(Composed(Static(batch=16), admission=MaxLength()))
    machine.arrive(prompt=50, output=3, count=2)
    assert machine.turn() == {0: 50, 1: 50}
    assert machine.turn() == {0: 1, 1: 1}
    machine.arrive(prompt=50, output=3)
    assert machine.turn() == {0: 1, 1: 1}  # both have their 3 tokens
    assert machine.turn() == {2: 50}


def test_a_static_batch_that_one_step_cannot_hold_starts_in_several():
    # 100 tokens a step: one prompt of 60 at a time. Nobody decodes before all have been computed.
    machine = Machine(Composed(Static(batch=3), admission=MaxLength()), max_tokens=100)
    machine.arrive(prompt=60, output=3, count=4)
    assert [machine.turn() for _ in range(4)] == [{0: 60}, {1: 60}, {2: 60}, {0: 1, 1: 1, 2: 1}]


def test_static_batches_stop_at_the_batch_size():
    scene = Scene()
    for _ in range(20):
        scene.waits(prompt=10)
    assert len(placed(plan(Composed(Static()), scene))) == 16


# --- Orca


def test_orca_refills_its_batch_at_every_step():
    machine = Machine(Composed(Orca(batch=2), admission=MaxLength()))
    machine.arrive(prompt=50, output=2)
    machine.arrive(prompt=60, output=4)
    machine.arrive(prompt=70, output=2)
    assert machine.turn() == {0: 50, 1: 60}
    assert machine.turn() == {0: 1, 1: 1}  # 0 has its 2 tokens and leaves
    assert machine.turn() == {1: 1, 2: 70}  # a whole prompt beside a decode
    assert machine.turn() == {1: 1, 2: 1}


def test_orca_counts_its_batch_by_step_so_that_a_pipeline_fills():
    machine = Machine(Composed(Orca(batch=2), admission=MaxLength()), stages=2)
    machine.arrive(prompt=50, output=3, count=6)
    assert machine.step() == {0: 50, 1: 50}
    assert machine.step() == {2: 50, 3: 50}
    machine.back()
    assert machine.step() == {0: 1, 1: 1}  # both places are taken: 4 and 5 wait
    machine.back()
    assert machine.step() == {2: 1, 3: 1}


def test_orca_leaves_the_decodes_beyond_its_batch_to_the_next_step():
    scene = Scene(stages=2)
    decodes = [scene.decodes() for _ in range(3)]
    scene.waits()
    assert list(placed(plan(Composed(Orca(batch=2)), scene))) == [decodes[0].id, decodes[1].id]


def test_orca_reserves_the_longest_output():
    # 50 blocks = 800 tokens. 300 + 101 - 1 = 400 tokens, twice, fill it; a third must wait though little is in use.
    machine = Machine(Composed(Orca(batch=16), admission=MaxLength()), blocks=50)
    machine.arrive(prompt=300, output=2, max_tokens=101, count=3)
    assert machine.turn() == {0: 300, 1: 300}
    assert machine.turn() == {0: 1, 1: 1}
    assert machine.turn() == {2: 300}


@pytest.mark.parametrize("budget", [Static(), Orca(), PrefillFirst()])
def test_a_prompt_longer_than_a_step_is_turned_away_and_says_why(budget):
    machine = Machine(Composed(budget), max_tokens=100)
    machine.arrive(prompt=101)
    machine.arrive(prompt=100)
    assert machine.step() == {1: 100}
    assert machine.rejected == {
        0: "prompt 101 must be computed in one step of at most 100 tokens: "
        "raise limits.max_tokens or choose a policy that cuts prompts into chunks"
    }


def test_one_that_is_turned_away_takes_no_place_in_the_batch():
    machine = Machine(Composed(Static(batch=2)), max_tokens=100)
    machine.arrive(prompt=101)
    machine.arrive(prompt=40, count=2)
    assert machine.step() == {1: 40, 2: 40}


# --- vLLM v0


def v0(tokens=1000, admission=None):
    return Composed(PrefillFirst(tokens), admission=admission or Watermark())


def test_v0_computes_whole_prompts_alone_while_decodes_stall():
    # 600 + 300 = 900; 200 more would be 1100 > 1000, and 100 behind it may not overtake.
    scene = Scene()
    scene.decodes()
    prompts = [scene.waits(prompt=tokens) for tokens in (600, 300, 200, 100)]
    assert placed(plan(v0(), scene)) == {prompts[0].id: 600, prompts[1].id: 300}


def test_v0_fills_its_budget_to_the_last_token():
    scene = Scene()
    prompts = [scene.waits(prompt=tokens) for tokens in (600, 400)]
    assert placed(plan(v0(), scene)) == {prompts[0].id: 600, prompts[1].id: 400}


def test_v0_decodes_all_when_no_prompt_can_start():
    # The prompt needs 10 blocks and the watermark is int(0.01 * 100) = 1; 10 are free, and the decodes have room.
    scene = Scene(blocks=100)
    decodes = [scene.decodes(100) for _ in range(3)]
    waiting = scene.waits(prompt=160)
    scene.fill(scene.rank.pool.free - 10)
    assert placed(plan(v0(), scene)) == {sequence.id: 1 for sequence in decodes}
    assert waiting.blocks == []


def test_v0_starts_a_prompt_at_the_watermark():
    scene = Scene(blocks=100)
    scene.decodes(100)
    waiting = scene.waits(prompt=160)
    scene.fill(scene.rank.pool.free - 11)
    assert placed(plan(v0(), scene)) == {waiting.id: 160}


def test_v0_computes_a_prompt_beyond_its_budget_alone():
    # It fits one step (8192), so it is served; vLLM would ignore it with a warning.
    scene = Scene()
    long, _ = scene.waits(prompt=1500), scene.waits(prompt=10)
    assert placed(plan(v0(), scene)) == {long.id: 1500}


def test_v0_recomputes_over_several_steps_what_no_longer_fits_one():
    # 90 tokens of prompt and 20 sampled ones: more than a step holds, but its prompt alone was accepted.
    scene = Scene(max_tokens=100)
    scene.decodes()
    sequence = scene.decodes(context=109, returned=20)
    scene.rank.preempt(sequence)
    draft = plan(v0(), scene)
    assert placed(draft) == {sequence.id: 100}
    draft = plan(v0(), scene)
    assert placed(draft) == {sequence.id: 10}


def test_v0_preempts_the_last_arrived_for_a_decode_without_a_block():
    # Both sequences are at a block's end and no block is free: the younger loses its 10.
    scene = Scene(blocks=100)
    old, young = scene.decodes(160), scene.decodes(160)
    scene.fill(80)
    draft = plan(v0(), scene)
    assert (placed(draft), victims(draft)) == ({old.id: 1}, [young.id])
    assert list(draft.waiting) == [young]


def test_v0_does_not_start_its_victim_again_in_the_same_step():
    scene = Scene(blocks=100)
    scene.decodes(160), scene.decodes(16)
    scene.fill(100 - 11)
    draft = plan(v0(admission=Always()), scene)
    assert victims(draft) == [1]
    assert 1 not in placed(draft)
