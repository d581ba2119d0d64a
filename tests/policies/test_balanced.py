"""Decodes spread over a pipeline: alone, in gLLM's token throttling of July 2026, and in its split_pd. Blocks of 16."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.balanced import BalancedDecode, Rotation, SplitPd, TokenThrottling2026
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.victims import Largest
from tests.policies.scene import Machine, Scene, placed, plan, victims

# --- balanced decode alone


def test_a_step_has_its_share_of_all_decodes_and_prompts_get_the_rest():
    # 5 ready + 2 in flight = 7; 7 / 4 -> 2. 100 - 2 = 98 for the prompt.
    scene = Scene(stages=4)
    ready = [scene.decodes() for _ in range(5)]
    scene.flies(*(scene.decodes(returned=2) for _ in range(2)))
    prompt = scene.waits(prompt=500)
    assert placed(plan(Composed(BalancedDecode(100)), scene)) == {ready[0].id: 1, ready[1].id: 1, prompt.id: 98}


def test_decodes_that_came_together_part_in_a_pipeline():
    # As in `test_decodes_clump_in_a_pipeline`, where all eight stay in one micro-batch.
    machine = Machine(Composed(BalancedDecode(512)), stages=4)
    machine.arrive(prompt=64, output=9, count=8)
    assert machine.step() == dict.fromkeys(range(8), 64)
    assert machine.step() == {}
    machine.back()
    assert [machine.step() for _ in range(4)] == [{2 * k: 1, 2 * k + 1: 1} for k in range(4)]
    machine.back()
    assert machine.step() == {0: 1, 1: 1}


def test_on_one_stage_it_is_chunked_prefill():
    plans = []
    for budget in (BalancedDecode(300), ChunkedPrefill(300)):
        scene = Scene()
        scene.decodes(), scene.partial(400, 200), scene.decodes(), scene.waits(prompt=500)
        plans.append(placed(plan(Composed(budget), scene)))
    assert plans[0] == plans[1] == {0: 1, 2: 1, 1: 200, 3: 98}


# --- the rotating remainder


def test_five_rows_on_four_stages():
    rotation, draft = Rotation(), Scene(stages=4).draft()
    assert [rotation.share(5, draft) for _ in range(8)] == [1, 1, 1, 2] * 2  # (5 + j) // 4
    assert [rotation.share(rows, draft) for rows in (0, 3)] == [1, 1]
    assert [rotation.share(6, draft) for _ in range(4)] == [1, 1, 2, 2]  # too few rows are no turn


@given(st.integers(1, 8), st.integers(0, 100), st.integers(0, 7))
def test_in_as_many_steps_as_stages_everybody_is_served_once(stages, more, before):
    """Hermite's identity: the sum of (N + j) // S over j = 0 .. S - 1 is N; wherever the turns begin."""
    rotation, draft, rows = Rotation(), Scene(stages=stages).draft(), stages + more
    for _ in range(before):
        rotation.share(rows, draft)
    assert sum(rotation.share(rows, draft) for _ in range(stages)) == rows


# --- token throttling of 2026: MaxP 8192, MinP 32, T 8. Without decodes the reserve is a block for each stage.


def budget_of(scene: Scene) -> int:
    return TokenThrottling2026().prefill(scene.draft())


@pytest.mark.parametrize(
    ("prompts", "free", "tokens"),
    [
        ((4000, 4000), 1000, 1000),  # WT: 8000 // 8
        ((8000,), 1000, 8192),  # a lone prompt: UT alone, which is 1
        ((50, 50), 1000, 32),  # 12 -> MinP
        # r = 4 / 1000; UT = (0.24 - 0.004) / 0.996 = 0.23695; * 8192 = 1941.1. B = 236 * 16 = 3776.
        ((8000,), 240, 1941),
        ((40_000, 40_000), 240, 1941),  # below 80000 // 8
        # UT = (0.01 - 0.004) / 0.996 = 0.006024; * 8192 = 49.3, and B = 6 * 16 = 96.
        ((8000,), 10, 49),
        ((50, 50), 5, 8),  # 0.001 / 0.996 * 8192 = 8.2: MinP lifts WT only
        ((8000,), 4, 0),  # all that is free is reserved
        ((), 1000, 0),
    ],
)
def test_prompts_tokens_of_a_step(prompts, free, tokens):
    scene = Scene(stages=4)
    for prompt in prompts:
        scene.waits(prompt=prompt)
    scene.fill(scene.rank.pool.free - free)
    assert budget_of(scene) == tokens


def test_the_rest_of_a_prompt_under_way_counts_as_one_that_waits():
    # 3000 + 5000 = 8000, // 8.
    scene = Scene(stages=4)
    scene.partial(6000, 1000), scene.waits(prompt=3000)
    assert budget_of(scene) == 1000


def test_the_reserve_bounds_it():
    # 97 of 100 tokens may still come: int(0.7 * 97) = 67. 98 tokens lie in 7 blocks, 14 more fit; 53 take 4 blocks.
    # Three of these: R = 12, r = 0.012; 979 are free. UT = (0.979 - 0.012) / 0.988 = 0.97874; * 8192 = 8017.9.
    scene = Scene(stages=4)
    for _ in range(3):
        scene.decodes(context=98, returned=3)
    scene.waits(prompt=10_000)
    assert budget_of(scene) == 8018


def test_with_one_stage_the_reserved_blocks_alone_bound_it():
    scene = Scene()
    scene.waits(prompt=50), scene.waits(prompt=50)
    scene.fill(scene.rank.pool.free - 100)
    assert budget_of(scene) == 99 * 16
    scene = Scene(blocks=2000)
    scene.waits(prompt=50)
    assert budget_of(scene) == 8192


def test_two_ranks_throttle_without_a_pipeline():
    scene = Scene(ranks=2)
    scene.waits(prompt=4000), scene.waits(prompt=4000)
    assert budget_of(scene) == 1000


def test_a_step_has_prompts_first_then_a_share_of_the_decodes():
    # N = 5: (5 + 0) // 4 = 1. The prompts: 800 // 8 = 100.
    scene = Scene(stages=4)
    decodes = [scene.decodes() for _ in range(5)]
    first, _ = scene.waits(prompt=400), scene.waits(prompt=400)
    draft = plan(Composed(TokenThrottling2026()), scene)
    assert list(placed(draft).items()) == [(first.id, 100), (decodes[0].id, 1)]


@pytest.mark.parametrize("budget", [TokenThrottling2026(), SplitPd()])
def test_a_preemption_makes_it_reserve_more(budget):
    # Both are at a block's end and nothing is free.
    scene = Scene(blocks=100)
    scene.decodes(160), scene.decodes(320)
    scene.fill(70)
    before = budget.reserve.ratio(scene.draft())
    draft = plan(Composed(budget, victims=Largest()), scene)
    assert victims(draft) == [1]
    assert budget.reserve.ratio(draft) > before


# --- split_pd


def split(tokens=400):
    return Composed(SplitPd(tokens))


def test_a_prompt_has_the_step_to_itself():
    scene = Scene(stages=4)
    for _ in range(8):
        scene.decodes(max_tokens=2)
    first, second = scene.waits(prompt=300), scene.waits(prompt=300)
    assert placed(plan(split(), scene)) == {first.id: 300, second.id: 100}


def test_without_prompts_decodes_are_spread_over_the_pipeline():
    scene = Scene(stages=4)
    for _ in range(8):
        scene.decodes()
    assert list(placed(plan(split(), scene))) == [0, 1]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (3, {2: 32}),  # one block is reserved: two are left for the prompt, and decodes wait
        (1, {0: 1, 1: 1}),  # as many as are reserved: the prompt is preferred, but gets nothing, so decodes run
        (0, {0: 1, 1: 1}),  # fewer
    ],
)
def test_when_memory_is_short(free, expected):
    scene = Scene()
    scene.decodes(max_tokens=2), scene.decodes(max_tokens=2)
    scene.waits(prompt=300)
    scene.fill(scene.rank.pool.free - free)
    assert placed(plan(split(), scene)) == expected


def test_below_the_reserve_decodes_come_first_and_count():
    # 900 may still come: int(0.7 * 899) = 629, less 12 that fit: 617 take 39 blocks; 30 are free.
    scene = Scene()
    decode = scene.decodes(max_tokens=900)
    scene.waits(prompt=300)
    scene.fill(scene.rank.pool.free - 30)
    assert placed(plan(split(), scene)) == {decode.id: 1}


@pytest.mark.parametrize(("free", "waiting", "prompt"), [(0, 1, {2: 398}), (1, 1, {}), (1, 0, {2: 398})])
def test_what_decodes_gain_by_a_preemption_is_for_prompts_if_decodes_came_first(free, waiting, prompt):
    # Two decodes need a block each; the largest gives up 50. One is reserved: below it decodes come first, as when
    # nobody waits, and the victim, now the first prompt, gets the other 398 tokens. Else the prompts' turn is over.
    scene = Scene(blocks=100)
    scene.decodes(160, max_tokens=2), scene.decodes(160, max_tokens=2), scene.decodes(800, max_tokens=2)
    for _ in range(waiting):
        scene.waits(prompt=900)
    scene.fill(30 - free)
    draft = plan(Composed(SplitPd(400), victims=Largest()), scene)
    assert (victims(draft), placed(draft)) == ([2], {0: 1, 1: 1} | prompt)


def test_victims_get_no_blocks_that_are_reserved():
    # 11 come free, one goes to the needy, and of the other 10 are reserved what it may still sample, 98 tokens:
    # (int(0.7 * 98) - 15) / 16 -> 4. Six are left.
    scene = Scene(blocks=21)
    scene.decodes(160, max_tokens=100), scene.decodes(161, max_tokens=2)
    draft = plan(Composed(SplitPd(400), victims=Largest()), scene)
    assert (victims(draft), placed(draft)) == ([1], {0: 1, 1: 96})


@pytest.mark.parametrize("kind", [BalancedDecode, SplitPd])
def test_refuses_no_tokens(kind):
    with pytest.raises(ValueError, match=r"policy\.budget\.tokens=0 must be at least 1"):
        kind(0)


@pytest.mark.parametrize("option", ["max_prefill", "min_prefill", "spread"])
def test_refuses_nothing(option):
    with pytest.raises(ValueError, match=rf"policy\.budget\.{option}=0 must be at least 1"):
        TokenThrottling2026(**{option: 0})
