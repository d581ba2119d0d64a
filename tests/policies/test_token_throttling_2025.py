"""Token throttling as the code of April 2025 has it (gLLM 52fbd4b), worked by hand.

MaxP 2048, MinP 32, T 8, threshold 0.05 and four stages, unless said otherwise. Blocks have 16 tokens.
"""

import pytest

from policies.budget import TokenThrottling2025
from policies.composed import Composed
from tests.policies.scene import Machine, Scene, placed, plan


def prefill(waiting, free, blocks=1000, stages=4, **options):
    """The budget with so many blocks free."""
    scene = Scene(blocks=blocks, stages=stages)
    scene.fill(blocks - free)
    return TokenThrottling2025(**options).prefill(waiting, scene.draft())


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [
        # WP // T. The threshold is int(0.05 * 1000) = 50 blocks: 950 * 16 = 15200 tokens of head-room.
        (8000, 1000, 1000),
        (8007, 1000, 1000),  # 1000.875: integer division
        (100_000, 1000, 2048),  # UT is 1: round(2048)
        (100, 1000, 32),  # 12 -> MinP
        # UT = (0.24 - 0.05) / 0.95 = 0.2; round(409.6) = 410, where the paper's formula was read as 409.
        (80_000, 240, 410),
        # The order of minimum and maximum: MinP lifts WP // T only, and UT bounds what comes out.
        # (0.06 - 0.05) / 0.95 * 2048 = 21.56 -> 22. The paper has 32 here.
        (80_000, 60, 22),
        (100, 60, 22),
        (100, 64, 30),  # 0.014 / 0.95 * 2048 = 30.2
        (100, 65, 32),  # 0.015 / 0.95 * 2048 = 32.3 -> 32
        (80_000, 51, 2),  # 0.001 / 0.95 * 2048 = 2.16
        # No head-room at the threshold, where the paper still has MinP.
        (80_000, 50, 0),
        (80_000, 10, 0),
    ],
)
def test_the_budget(waiting, free, tokens):
    assert prefill(waiting, free) == tokens


@pytest.mark.parametrize(
    ("free", "tokens"),
    [
        # 100 blocks, 5 of them the threshold. Pages bound first: 16 * (free - 5) < 21.56 * (free - 5).
        (25, 320),
        (6, 16),
        (5, 0),
    ],
)
def test_pages_above_the_threshold_are_a_hard_limit(free, tokens):
    assert prefill(80_000, free, blocks=100) == tokens


@pytest.mark.parametrize(("free", "tokens"), [(1000, 2048), (60, 160), (50, 0)])
def test_with_one_stage_only_the_pages_bound(free, tokens):
    # Neither WT nor UT: min(MaxP, 16 * (free - 50)).
    assert prefill(100, free, stages=1) == tokens


@pytest.mark.parametrize(("waiting", "free", "tokens"), [(100, 1000, 2048), (100, 240, 410), (100, 60, 22)])
def test_without_wt(waiting, free, tokens):
    assert prefill(waiting, free, wt=False) == tokens


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [(8000, 240, 1000), (100_000, 1000, 2048), (100, 60, 32), (8000, 60, 160), (8000, 50, 0)],
)
def test_without_ut_maxp_and_pages_bound_still(waiting, free, tokens):
    assert prefill(waiting, free, ut=False) == tokens


# --- decodes: Random(0).randint(0, 3) gives 3, 3, 0, 2, 3, 3, 2, 3, ...


def test_the_jitter():
    scene = Scene(stages=4, seed=0)
    draft = scene.draft()
    budget = TokenThrottling2025()
    assert [budget.decodes(rows, draft) for rows in (0, 1, 3)] == [0, 1, 3]  # below the depth: all, nothing drawn
    assert budget.decodes(5, draft) == 2  # (5 + 3) // 4
    assert budget.decodes(5, draft) == 2  # (5 + 3) // 4
    assert budget.decodes(5, draft) == 1  # (5 + 0) // 4
    assert budget.decodes(6, draft) == 2  # (6 + 2) // 4
    assert budget.decodes(4, draft) == 1  # (4 + 3) // 4
    assert budget.decodes(10, draft) == 3  # (10 + 3) // 4


def test_one_stage_decodes_all_and_draws_nothing():
    scene = Scene(stages=1)
    before = scene.rng.getstate()
    assert TokenThrottling2025().decodes(7, scene.draft()) == 7
    assert scene.rng.getstate() == before


def policy(**options):
    return Composed(TokenThrottling2025(**options))


def test_everything_in_flight_counts_as_decodes():
    # 3 ready, 2 decodes and 3 chunks in flight: 8. (8 + 3) // 4 = 2; 3 ready alone would all be served.
    scene = Scene(stages=4, seed=0)
    for _ in range(3):
        scene.decodes()
    scene.flies(*(scene.decodes(returned=2) for _ in range(2)), *(scene.partial(500, 400) for _ in range(3)))
    scene.fill(scene.rank.pool.free)  # decodes only
    assert len(placed(plan(policy(), scene))) == 2


def test_a_prompt_with_a_chunk_in_flight_waits_and_does_not_count():
    # The first prompt's other 4000 are left out: 1600 // 8 = 200 for the next.
    scene = Scene(stages=4)
    scene.flies(scene.partial(5000, 1000))
    waiting = scene.waits(prompt=1600)
    assert placed(plan(policy(), scene)) == {waiting.id: 200}


def test_prompts_through_a_pipeline_of_four():
    """As in the paper's variant, but one chunk of a prompt at a time: each step begins another one."""
    machine = Machine(policy(), stages=4)
    machine.arrive(prompt=1000, output=10, count=4)
    assert machine.step() == {0: 500}  # 4000 // 8
    assert machine.step() == {1: 375}  # 3000 // 8: the first one's rest is in flight
    assert machine.step() == {2: 250}  # 2000 // 8
    assert machine.step() == {3: 125}  # 1000 // 8
    assert machine.step() == {}
    machine.back()
    assert machine.step() == {0: 62}  # 500 // 8 = 62.5
    machine.back()
    assert machine.step() == {1: 78}  # 625 // 8 = 78.1
    machine.back()
    assert machine.step() == {2: 93}  # 750 // 8 = 93.75
    machine.back()
    assert machine.step() == {3: 109}  # 875 // 8 = 109.4
    machine.back()
    assert machine.step() == {0: 54}  # 438 // 8 = 54.75


def test_decodes_through_a_pipeline_of_four():
    """Six prompts of 16 tokens, two a step (MinP 32); then the jitter decides. Draws: 3, 3, 0, 2, 3, 3, 2."""
    machine = Machine(policy(), seed=0, stages=4)
    machine.arrive(prompt=16, output=50, count=6)
    assert machine.step() == {0: 16, 1: 16}  # N = 0
    assert machine.step() == {2: 16, 3: 16}  # N = 2, in flight
    assert machine.step() == {4: 16, 5: 16}  # N = 4: (4 + 3) // 4 = 1, but none is ready
    assert machine.step() == {}  # N = 6: (6 + 3) // 4 = 2, none ready
    machine.back()
    assert machine.step() == {0: 1}  # N = 2 ready + 4 in flight: (6 + 0) // 4 = 1
    assert machine.step() == {1: 1}  # N = 1 + 5: (6 + 2) // 4 = 2, one is ready
    machine.back()
    assert machine.step() == {2: 1, 3: 1}  # N = 2 + 4: (6 + 3) // 4 = 2
    machine.back()
    assert machine.step() == {4: 1, 5: 1}  # N = 6: (6 + 3) // 4 = 2
    machine.back()
    assert machine.step() == {0: 1}  # N = 1 + 5: (6 + 2) // 4 = 2, one is ready


def test_those_served_longest_ago_are_next_not_those_that_came_back_last():
    # A deviation on purpose: the code takes from the end that it also puts back to.
    scene = Scene(stages=4, seed=0)
    sequences = [scene.decodes() for _ in range(5)]
    for sequence, step in zip(sequences, (9, 5, 6, 8, 7), strict=True):
        sequence.step = step
    assert list(placed(plan(policy(), scene))) == [1, 2]  # (5 + 3) // 4
