"""vLLM v1: one loop in list order, then the queue."""

import pytest

from policies.budget import Unified
from policies.composed import Composed
from tests.policies.scene import Machine, Scene, placed, plan, victims


def v1(tokens=512, threshold=0):
    return Composed(Unified(tokens, threshold))


def test_a_long_prompt_spends_the_budget_before_whoever_was_admitted_after_it():
    # 512: 1 for the first decode, 511 of the prompt's remaining 700. The second decode gets nothing.
    scene = Scene()
    first, prompt, second = scene.decodes(), scene.partial(1000, 300), scene.decodes()
    scene.waits()
    assert placed(plan(v1(), scene)) == {first.id: 1, prompt.id: 511}
    assert second.launched == 100


def test_what_running_sequences_leave_goes_to_the_queue_until_the_budget_is_spent():
    # 512 - 1 - 100 = 411, less the first prompt's 300 leaves 111 of the second's 200.
    scene = Scene()
    decode, partial = scene.decodes(), scene.partial(1000, 900)
    first, second, third = scene.waits(prompt=300), scene.waits(prompt=200), scene.waits(prompt=10)
    draft = plan(v1(), scene)
    assert placed(draft) == {decode.id: 1, partial.id: 100, first.id: 300, second.id: 111}
    assert draft.tokens == 512
    assert list(draft.waiting) == [third]


def test_the_threshold_caps_every_prompt_in_the_queue_and_out_of_it():
    # 1 + 100 + 1 = 102 for running ones, 100 for the next, and 50 for one that is below it.
    scene = Scene()
    running = [scene.decodes(), scene.partial(1000, 300), scene.decodes()]
    long, short = scene.waits(prompt=5000), scene.waits(prompt=50)
    expected = dict(zip([sequence.id for sequence in (*running, long, short)], [1, 100, 1, 100, 50], strict=True))
    assert placed(plan(v1(threshold=100), scene)) == expected


def test_nobody_is_admitted_in_a_step_that_preempted():
    # No block is free; the first decode needs one. The last arrived gives 10 up, and the 99 tokens that are left of the
    # budget would go into 7 of them.
    scene = Scene(blocks=100)
    needy, young = scene.decodes(160), scene.decodes(160)
    waiting = scene.waits(prompt=16, arrival=0.5)
    scene.fill(80)
    draft = plan(v1(tokens=100), scene)
    assert (placed(draft), victims(draft)) == ({needy.id: 1}, [young.id])
    assert draft.blocks_free == 9
    assert list(draft.waiting) == [young, waiting]


def test_the_last_arrived_gives_way_to_itself_and_the_others_go_on():
    # The youngest is at a block's end and nothing is free: it is its own victim. The older ones need no block.
    scene = Scene(blocks=100)
    old, older = scene.decodes(150), scene.decodes(150)
    needy = scene.decodes(160)
    scene.fill(70)
    draft = plan(v1(), scene)
    assert (placed(draft), victims(draft)) == ({old.id: 1, older.id: 1}, [needy.id])


def test_a_chunk_preempts_for_its_blocks_too():
    # 64 more tokens need 4 blocks, 2 are free; the younger decode's 7 go.
    scene = Scene(blocks=100)
    prompt, young = scene.partial(224, 160), scene.decodes(100)
    scene.fill(100 - 17 - 2)
    draft = plan(v1(), scene)
    assert (placed(draft), victims(draft)) == ({prompt.id: 64}, [young.id])


def test_a_victim_that_was_already_placed_is_taken_back():
    # The younger was admitted first, so it is served first, until the older needs its blocks.
    scene = Scene(blocks=100)
    young, old = scene.decodes(150, arrival=9.0), scene.decodes(160, arrival=1.0)
    scene.fill(80)
    draft = plan(v1(), scene)
    assert (placed(draft), victims(draft)) == ({old.id: 1}, [young.id])
    assert draft.tokens == 1


def test_a_first_chunk_that_does_not_fit_is_not_made_smaller():
    # 160 tokens need 10 blocks, 9 are free: vLLM's allocate_slots fails, and the queue stops.
    scene = Scene(blocks=100)
    scene.waits(prompt=160), scene.waits(prompt=16)
    decode = scene.decodes(100)
    scene.fill(scene.rank.pool.free - 9)
    assert placed(plan(v1(), scene)) == {decode.id: 1}


def test_several_steps():
    machine = Machine(v1(tokens=100))
    machine.arrive(prompt=150, output=3)
    machine.arrive(prompt=70, output=2)
    assert machine.turn() == {0: 100}
    assert machine.turn() == {0: 50, 1: 50}
    assert machine.turn() == {0: 1, 1: 20}
    assert machine.turn() == {0: 1, 1: 1}


def test_chunks_of_one_prompt_follow_each_other_through_a_pipeline():
    machine = Machine(v1(tokens=100), stages=2)
    machine.arrive(prompt=250, output=2)
    assert machine.step() == {0: 100}
    assert machine.step() == {0: 100}
    machine.back()
    assert machine.step() == {0: 50}
    machine.back()
    assert machine.step() == {}  # its first token is on its way


def test_a_threshold_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"policy.budget.long_prefill_threshold=-1 must be 0"):
        Unified(long_prefill_threshold=-1)


def test_a_prompt_that_is_alone_is_not_capped():
    # vLLM PR #57951: there is nobody to leave anything to.
    scene = Scene()
    prompt = scene.waits(prompt=5000)
    assert placed(plan(v1(threshold=100), scene)) == {prompt.id: 512}
    scene = Scene()
    prompt, _ = scene.partial(5000, 300), scene.waits(prompt=50)
    assert placed(plan(v1(threshold=100), scene))[prompt.id] == 100


@pytest.mark.parametrize(("most", "admitted"), [(0, 3), (1, 0), (2, 1), (3, 2)])
def test_prompts_under_way_hold_new_ones_back(most, admitted):
    # One goes on and ends in this step; it counts until the next, and so does a new one that is computed whole.
    scene = Scene()
    decode, partial = scene.decodes(), scene.partial(1000, 900)
    new = [scene.waits(prompt=50) for _ in range(3)]
    expected = {decode.id: 1, partial.id: 100} | {prompt.id: 50 for prompt in new[:admitted]}
    assert placed(plan(Composed(Unified(512, max_partial=most)), scene)) == expected


def test_in_a_pipeline_those_that_came_together_stay_together():
    """The failure that balanced decodes mend: groups are whoever is not in flight, whatever their sizes."""
    machine = Machine(v1(), stages=4)
    groups = []
    for count in (1, 5, 2):
        machine.arrive(prompt=16, output=50, count=count)
        groups.append(dict.fromkeys(machine.step(), 1))
    assert list(map(len, groups)) == [1, 5, 2]
    for turn in range(12):
        machine.back()
        assert machine.step() == groups[turn % 3]
        assert machine.step() == {}  # a fourth micro-batch would have room
