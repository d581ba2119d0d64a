"""Prompts of ranks in lockstep wait for one another: who, for how long, and when not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import Watermark
from policies.align import PrefillDelayer
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from tests.playground.laws import simulate
from tests.playground.strategies import BUDGETS, Composition, scenarios
from tests.policies.scene import Machine, Scene, placed, plan


def machine(align, budget=512, ranks=2, admission=None, **options) -> Machine:
    """Two ranks in lockstep, which get requests by turns, the first of them a decode each."""
    choices = {"admission": admission} if admission else {}
    made = Machine(Composed(ChunkedPrefill(budget), align=align, **choices), ranks=ranks, lockstep=True, **options)
    made.arrive(10, count=ranks)
    made.turn()
    return made


def test_a_lone_prompt_waits_for_the_other_ranks_and_then_goes_alone():
    """Sequences 0 and 1 decode on ranks 0 and 1, and nothing comes to rank 1."""
    made = machine(PrefillDelayer(max_delay=3))
    made.arrive(20)
    golden = [{0: 1, 1: 1}] * 3 + [{0: 1, 2: 20, 1: 1}] + [{0: 1, 2: 1, 1: 1}]
    assert [made.turn() for _ in golden] == golden


def test_prompts_start_together_when_the_last_rank_has_one():
    made = machine(PrefillDelayer(max_delay=30))
    made.arrive(20)
    assert made.turn() == {0: 1, 1: 1}
    made.arrive(30)
    assert made.turn() == {0: 1, 2: 20, 1: 1, 3: 30}


def test_waiting_begins_anew_after_a_start():
    made = machine(PrefillDelayer(max_delay=2))
    made.arrive(20)
    for _ in range(3):
        made.turn()
    made.arrive(5)  # rank 1: now that one waits
    prompts = [5 in made.turn().values() for _ in range(3)]
    assert prompts == [False, False, True]


def test_a_rank_within_a_prompt_is_one_that_prefills():
    """Rank 0 needs two steps for its prompt: what comes to rank 1 meanwhile goes with the second half."""
    made = machine(PrefillDelayer(max_delay=1), budget=17)
    made.arrive(30)
    made.turn()
    assert made.turn() == {0: 1, 2: 16, 1: 1}
    made.arrive(5)
    assert made.turn() == {0: 1, 2: 14, 1: 1, 3: 5}


def test_chunks_of_a_prompt_that_started_are_not_held_back():
    made = machine(PrefillDelayer(max_delay=5), budget=17)
    made.arrive(40, count=2)
    made.turn()
    made.scheduler.abort(3, made.clock)
    assert [made.turn()[2] for _ in range(2)] == [16, 8]


def test_nobody_waits_where_nothing_else_is_to_be_done():
    made = Machine(Composed(ChunkedPrefill(), align=PrefillDelayer()), ranks=2, lockstep=True)
    made.arrive(20)
    assert made.turn() == {0: 20}


def test_a_rank_without_work_waits_while_others_decode():
    made = Machine(Composed(ChunkedPrefill(), align=PrefillDelayer(max_delay=2)), ranks=2, lockstep=True)
    made.arrive(20)
    made.turn()
    made.arrive(30)  # rank 1 is idle, but rank 0 decodes
    assert [made.turn() for _ in range(3)] == [{0: 1}, {0: 1}, {0: 1, 1: 30}]


def test_a_rank_with_little_kv_in_use_does_not_wait():
    low, high = machine(PrefillDelayer(low_watermark=0.2), blocks=10), machine(PrefillDelayer(), blocks=10)
    for made in (low, high):  # 1 of 10 blocks is in use
        made.arrive(20)
    assert low.turn() == {0: 1, 2: 20, 1: 1}
    assert high.turn() == {0: 1, 1: 1}


def test_the_watermark_is_of_ranks_that_could_start():
    """Rank 0 uses 3 of 10 blocks and has a prompt; that rank 1 uses 1 is no reason to go."""
    made = Machine(Composed(ChunkedPrefill(), align=PrefillDelayer(low_watermark=0.2)), 10, ranks=2, lockstep=True)
    made.arrive(40)
    made.arrive(10)
    made.turn()
    made.arrive(20)
    assert made.turn() == {0: 1, 1: 1}


def test_a_rank_whose_prompt_does_not_fit_is_not_waited_with():
    """Both have prompts; rank 0's is too large for its memory, so rank 1's waits for a time in which it is not."""
    made = machine(PrefillDelayer(max_delay=2), blocks=10)
    made.arrive(159, output=1)
    made.arrive(20)
    assert [made.turn() for _ in range(3)] == [{0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1, 3: 20}]


def test_nor_is_one_whose_admission_says_no():
    """Half of ten blocks are to stay free: rank 0's prompt takes five of nine."""
    made = machine(PrefillDelayer(max_delay=1), blocks=10, admission=Watermark(0.5))
    made.arrive(80, output=10)
    made.arrive(20)
    assert [made.turn() for _ in range(2)] == [{0: 1, 1: 1}, {0: 1, 1: 1, 3: 20}]


def test_nor_is_one_without_a_seat():
    made = machine(PrefillDelayer(max_delay=1), max_seqs=2)
    made.arrive(20, count=2)
    made.turn()
    made.arrive(20, count=2)  # no seat on either: nobody can start, and nobody was waited for
    made.scheduler.abort(2, made.clock)
    assert made.turn() == {0: 1, 1: 1, 3: 1}
    assert made.turn() == {0: 1, 4: 20, 1: 1, 3: 1}


class Never(PrefillDelayer):
    def __call__(self, draft, ready):
        return False


def test_a_swapped_sequence_comes_back_while_prompts_wait():
    """It has been started: what comes back is a copy, not a prompt."""
    scene = Scene(host_blocks=20)
    scene.decodes()
    away = scene.decodes()
    scene.rank.swap_out(away)
    scene.rank.copied_out(away)
    scene.waits()
    draft = plan(Composed(ChunkedPrefill(), align=Never()), scene)
    assert placed(draft) == {0: 1}
    assert [copy.sequence for copy in draft.copies] == [away.id]


@given(scenarios(composition=st.builds(Composition, BUDGETS), lockstep=True, ranks=2), st.integers(1, 6))
def test_laws_hold_and_every_request_is_served_however_long_prompts_wait(scenario, delay):
    simulate(scenario.but(composition=Composition(scenario.composition.budget, delay=(delay, 0.0))))


@given(st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_first_in_the_queue_waits_so_many_steps_at_most(delay, prompts):
    made = machine(PrefillDelayer(max_delay=delay))
    for prompt in prompts:  # to rank 0, as rank 1's are taken back at once
        made.arrive(prompt)
        made.arrive(1)
        made.scheduler.abort(made.requests - 1, made.clock)
    waited = 0
    while made.scheduler.ranks[0].waiting:
        before = len(made.scheduler.ranks[0].waiting)
        made.turn()
        waited = waited + 1 if len(made.scheduler.ranks[0].waiting) == before else 0
        assert waited <= delay


def test_replicas_have_nothing_to_wait_for():
    with pytest.raises(ValueError, match=r"policy.align=prefill_delayer: .* set parallel.dp_attention=true"):
        Machine(Composed(ChunkedPrefill(), align=PrefillDelayer()), ranks=2)


@pytest.mark.parametrize("options", [{"max_delay": 0}, {"low_watermark": 1.5}, {"low_watermark": -0.1}])
def test_impossible_settings_are_named(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"policy.align.{name}="):
        PrefillDelayer(**options)


def test_peers_are_the_ranks_to_come():
    seen = []

    class Looks(Composed):
        def fill(self, draft):
            seen.append((draft.rank, draft.ordinal, [(peer.rank, peer.tokens) for peer in draft.peers]))
            super().fill(draft)

    made = Machine(Looks(ChunkedPrefill()), ranks=3, lockstep=True)
    made.arrive(10, count=3)
    made.turn()
    assert seen == [(0, 1, [(1, 0), (2, 0)]), (1, 1, [(2, 0)]), (2, 1, [])]
