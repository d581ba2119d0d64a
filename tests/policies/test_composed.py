"""How choices are joined: phases, swapping, quiet stretches, and never standing still."""

from dataclasses import dataclass

import pytest

from playground.core import COPY_IN, COPY_OUT, Step
from playground.draft import How
from policies.admission import FullPrompt, MaxLength, Watermark
from policies.budget import ChunkedPrefill, PrefillFirst, Static, TokenThrottling, TokenThrottling2025, Unified
from policies.composed import FOREVER, Admissions, Chunks, Composed, Decodes, Running
from policies.victims import LastArrived
from tests.policies.scene import Machine, Scene, placed, plan, victims


@dataclass
class Phases:
    """A budget that a test spells out."""

    wanted: tuple

    def phases(self, draft):
        yield from self.wanted


def made_of(*phases, **choices):
    return Composed(Phases(phases), **choices)


# --- phases


def test_decodes_up_to_so_many_rows():
    scene = Scene()
    sequences = [scene.decodes() for _ in range(3)]
    assert placed(plan(made_of(Decodes(rows=2)), scene)) == {sequences[0].id: 1, sequences[1].id: 1}


def test_chunks_in_order_of_admission_up_to_so_many_tokens():
    scene = Scene()
    first, second = scene.partial(500, 400), scene.partial(500, 400)
    assert placed(plan(made_of(Chunks(150)), scene)) == {first.id: 100, second.id: 50}


def test_a_chunk_shrinks_to_the_memory_there_is():
    # 400 tokens fill 25 blocks; 3 more are free.
    scene = Scene()
    prompt = scene.partial(500, 400)
    scene.fill(1000 - 25 - 3)
    draft = plan(made_of(Chunks()), scene)
    assert (placed(draft), victims(draft)) == ({prompt.id: 48}, [])


def test_idle_chunks_pass_over_prompts_in_flight():
    scene = Scene(stages=2)
    flying, idle = scene.partial(500, 400), scene.partial(500, 400)
    scene.flies(flying)
    assert placed(plan(made_of(Chunks(idle=True)), scene)) == {idle.id: 100}
    assert placed(plan(made_of(Chunks()), scene)) == {flying.id: 100}


def test_running_takes_decodes_and_chunks_alike():
    scene = Scene()
    first, prompt, last = scene.decodes(), scene.partial(500, 400), scene.decodes()
    assert placed(plan(made_of(Running(tokens=50, each=30)), scene)) == {first.id: 1, prompt.id: 30, last.id: 1}


def test_admissions_up_to_so_many_rows_and_tokens():
    scene = Scene()
    one, two, three, four = (scene.waits(prompt=100) for _ in range(4))
    assert placed(plan(made_of(Admissions(rows=2)), scene)) == {one.id: 100, two.id: 100}
    assert placed(plan(made_of(Admissions(tokens=120)), scene)) == {three.id: 100, four.id: 20}


def test_whole_prompts_are_not_cut_but_alone():
    scene = Scene()
    first, second = scene.waits(prompt=100), scene.waits(prompt=100)
    assert placed(plan(made_of(Admissions(tokens=150, whole=True)), scene)) == {first.id: 100}
    assert placed(plan(made_of(Admissions(tokens=50, whole=True)), scene)) == {second.id: 100}


def test_a_cached_prefix_costs_no_tokens():
    # 160 tokens, 5 blocks of 16 cached: 80 remain.
    for whole in (False, True):
        scene = Scene()
        hashes = tuple(range(10))
        owner = scene.partial(160, 80, hashes=hashes)
        scene.rank.publish(owner, 80)
        first, waiting = scene.waits(prompt=20), scene.waits(prompt=160, hashes=hashes)
        expected = {first.id: 20, waiting.id: 80}
        assert placed(plan(made_of(Admissions(tokens=100, whole=whole)), scene)) == expected


def test_limits_of_the_backend_bound_every_phase():
    scene = Scene(max_tokens=5, max_seqs=4)
    decodes = [scene.decodes() for _ in range(3)]
    scene.waits(prompt=1), scene.waits(prompt=1)
    draft = plan(made_of(Decodes(), Admissions()), scene)
    assert list(placed(draft)) == [*(sequence.id for sequence in decodes), 3]  # the fourth seat; there is no fifth
    scene = Scene(max_tokens=5)
    [scene.decodes() for _ in range(3)]
    scene.waits(prompt=10)
    assert placed(plan(made_of(Decodes(), Admissions()), scene)) == {0: 1, 1: 1, 2: 1, 3: 2}


# --- memory


def test_one_victim_after_another_until_there_is_room():
    # 64 tokens need 4 blocks. Each victim gives 2.
    scene = Scene(blocks=100)
    prompt = scene.partial(224, 160)
    young = [scene.decodes(30) for _ in range(3)]
    scene.fill(100 - 16)
    draft = plan(made_of(Running()), scene)
    assert victims(draft) == [young[2].id, young[1].id]
    assert placed(draft) == {prompt.id: 64, young[0].id: 1}


def test_a_decode_waits_for_a_victim_in_flight_rather_than_take_another():
    # With run-ahead all may be in flight: the victim's blocks come when its slice commits.
    scene = Scene(blocks=100, forwards_tokens=True)
    needy, victim, third = (scene.decodes(160, returned=2) for _ in range(3))
    scene.flies(needy, third, victim)
    scene.fill(70)
    draft = plan(made_of(Decodes()), scene)
    assert (placed(draft), victims(draft)) == ({}, [third.id])
    draft = plan(made_of(Decodes()), scene)
    assert (placed(draft), victims(draft)) == ({}, [])
    assert draft.blocks_freeing == 10


def on_the_host(scene, context):
    """A decode whose KV was swapped out."""
    victim = scene.decodes(context)
    scene.draft().preempt(victim, How.SWAP)
    scene.rank.copied_out(victim)
    return victim


def swapping(budget=None, admission=None):
    return Composed(budget or Unified(), admission=admission or Watermark(0.0), victims=LastArrived("swap"))


def test_a_victims_kv_is_copied_out_and_nobody_else_gives_way_meanwhile():
    scene = Scene(blocks=100, host_blocks=100, stages=2)
    _, middle, victim = (scene.decodes(160) for _ in range(3))
    scene.fill(70)
    draft = plan(swapping(), scene)
    assert (placed(draft), victims(draft)) == ({}, [victim.id])  # its blocks are its own until the copy is done
    assert [(copy.sequence, len(copy.source), copy.lane) for copy in draft.copies] == [(victim.id, 10, COPY_OUT)]
    scene.flights.append(Step(0, 0, 0.0, (), tuple(draft.copies)))
    draft = plan(swapping(), scene)
    assert (placed(draft), victims(draft)) == ({}, [])
    scene.flights.clear()
    scene.rank.copied_out(victim)
    assert placed(plan(swapping(), scene)) == {0: 1, middle.id: 1}


def test_a_swapped_sequence_comes_back_before_new_ones_and_with_room_for_its_next_token():
    scene = Scene(blocks=100, host_blocks=100)
    scene.decodes(100)
    victim = on_the_host(scene, 160)
    scene.waits(prompt=16)
    scene.fill(scene.rank.pool.free - 10)
    draft = plan(swapping(), scene)  # 10 blocks would hold what it has, but not its next token
    assert (placed(draft), draft.copies) == ({0: 1}, [])
    scene.frees(1)
    draft = plan(swapping(), scene)
    assert [(copy.sequence, copy.lane) for copy in draft.copies] == [(victim.id, COPY_IN)]


def test_without_room_on_the_host_a_victim_is_recomputed():
    scene = Scene(blocks=100, host_blocks=9)
    needy, victim = scene.decodes(160), scene.decodes(160)
    scene.fill(80)
    draft = plan(swapping(), scene)
    assert (placed(draft), victims(draft), draft.copies) == ({needy.id: 1}, [victim.id], [])


# --- never standing still


def test_an_idle_rank_starts_its_first_whatever_admission_says():
    # 1600 tokens are all 100 blocks: no watermark is left, ever.
    scene = Scene(blocks=100)
    waiting = scene.waits(prompt=1600, max_tokens=1)
    assert placed(plan(Composed(ChunkedPrefill(), admission=FullPrompt(0.5)), scene)) == {waiting.id: 1600}


def test_an_idle_rank_brings_its_first_back_from_the_host():
    scene = Scene(blocks=100, host_blocks=100)
    on_the_host(scene, 1590)
    draft = plan(swapping(admission=Watermark(0.9)), scene)
    assert [copy.lane for copy in draft.copies] == [COPY_IN]


BUDGETS = [Static(), PrefillFirst(), Unified(), ChunkedPrefill(), TokenThrottling(), TokenThrottling2025()]


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: type(budget).__name__)
def test_half_computed_prompts_that_hold_all_memory_do_not_stall(budget, stages):
    """gLLM's stall: no decode is left, nothing is free, and only decodes could give way."""
    scene = Scene(blocks=100, stages=stages)
    old, _, young = scene.partial(1000, 512), scene.partial(1000, 512), scene.partial(1000, 576)
    scene.waits(prompt=100)
    draft = plan(Composed(budget), scene)
    assert placed(draft).get(old.id) == 488  # 31 blocks, of the youngest's 36
    assert victims(draft)[0] == young.id


def test_with_steps_in_flight_there_is_no_hurry():
    scene = Scene(blocks=100, stages=4)
    old, young = scene.partial(1000, 800), scene.partial(1000, 800)
    scene.flies(old)
    draft = plan(Composed(TokenThrottling()), scene)
    assert (placed(draft), victims(draft)) == ({}, [])
    assert young.blocks


def test_a_budget_that_waits_on_purpose_is_left_alone():
    class Patient:
        def phases(self, draft):
            draft.wake(draft.now + 1.0)
            yield from ()

    scene = Scene()
    scene.waits()
    draft = plan(Composed(Patient()), scene)
    assert draft.empty
    assert draft.wake_at == 11.0


# --- quiet stretches


def steady(policy, scene):
    return policy.steady(plan(policy, scene))


def test_decodes_alone_go_on_for_ever():
    scene = Scene()
    scene.decodes(), scene.decodes()
    assert steady(Composed(ChunkedPrefill()), scene) == FOREVER


def test_nothing_is_promised_while_somebody_may_come_in():
    scene = Scene()
    scene.decodes()
    scene.waits(prompt=16 * 1001)
    assert steady(Composed(ChunkedPrefill(), admission=FullPrompt()), scene) == 0


def test_with_every_seat_taken_nobody_can_come_in():
    scene = Scene(max_seqs=1)
    scene.decodes(), scene.waits()
    assert steady(Composed(ChunkedPrefill()), scene) == FOREVER


def test_nothing_is_promised_beside_a_prompt_or_with_decodes_left_out():
    scene = Scene()
    scene.decodes(), scene.partial(1000, 100)
    assert steady(Composed(Static()), scene) == 0
    scene = Scene()
    scene.decodes(), scene.decodes()
    assert steady(Composed(Unified(tokens=1)), scene) == 0


def test_a_budget_that_promises_nothing_is_stepped():
    scene = Scene()
    scene.decodes()
    assert steady(made_of(Decodes()), scene) == 0


def test_max_length_never_preempts():
    machine = Machine(Composed(Unified(), admission=MaxLength()), blocks=60)
    machine.arrive(prompt=100, output=100, count=20)
    while machine.turn():
        pass
    assert machine.preempted == []
    assert not machine.scheduler.live
