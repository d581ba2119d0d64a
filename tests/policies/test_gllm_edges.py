"""The edge cases of gLLM that a scheduler's author should know, and what our policies do with them."""

from itertools import product
from random import Random

import pytest

from policies.admission import Always, FullPrompt, MaxLength, Watermark
from policies.budget import (
    ChunkedPrefill,
    Orca,
    PrefillFirst,
    Static,
    TokenThrottling,
    TokenThrottling2025,
    Unified,
)
from policies.composed import Composed
from policies.victims import Largest, LastArrived
from tests.policies.scene import Machine, Scene, placed, plan, victims


def test_case_1_a_budget_rounded_to_nothing_with_blocks_free():
    # 5000 blocks, 251 free: one above the threshold of 250. UT = (0.0502 - 0.05) / 0.95 = 0.00021; * 2048 = 0.43 -> 0,
    # though 16 tokens would fit. The paper's variant has MinP.
    scene = Scene(blocks=5000, stages=4)
    partial = scene.partial(1000, 160)
    decode = scene.decodes(160)
    scene.fill(scene.rank.pool.free - 251)
    assert TokenThrottling2025().prefill(840, scene.draft()) == 0
    assert placed(plan(Composed(TokenThrottling2025()), scene)) == {decode.id: 1}  # nothing stalls as long as one runs
    assert placed(plan(Composed(TokenThrottling()), scene)) == {partial.id: 32}


def test_case_1_without_a_decode_the_oldest_goes_on():
    scene = Scene(blocks=5000, stages=4)
    partial = scene.partial(1000, 160)
    scene.fill(scene.rank.pool.free - 251)
    draft = plan(Composed(TokenThrottling2025()), scene)
    assert (placed(draft), victims(draft)) == ({partial.id: 840}, [])


@pytest.mark.parametrize("budget", [TokenThrottling(), TokenThrottling2025()])
def test_case_2_the_floor_never_exceeds_what_waits(budget):
    scene = Scene(stages=4)
    first, second = scene.waits(prompt=10), scene.waits(prompt=5)  # 15 / 8 -> MinP 32
    assert placed(plan(Composed(budget), scene)) == {first.id: 10, second.id: 5}


@pytest.mark.parametrize("budget", [TokenThrottling(), TokenThrottling2025()])
def test_case_3_a_lone_long_prompt_is_throttled_too(budget):
    # gLLM's main since December 2025 would take 2048 at once, or 8192 with its own MaxP.
    scene = Scene(stages=4)
    prompt = scene.waits(prompt=8192)
    assert placed(plan(Composed(budget), scene)) == {prompt.id: 1024}  # 8192 / 8


def test_case_4_chunks_in_flight_inflate_the_decodes_of_the_code_not_of_the_paper():
    # Paper: 4 decodes / 4 stages = 1. Code: 4 ready + 4 chunks in flight = 8; (8 + 3) // 4 = 2 (Random(0) draws 3).
    for budget, rows in ((TokenThrottling(), 1), (TokenThrottling2025(), 2)):
        scene = Scene(stages=4, seed=0)
        for _ in range(4):
            scene.decodes()
        scene.flies(*(scene.partial(500, 400) for _ in range(4)))
        scene.fill(scene.rank.pool.free)  # decodes only
        assert len(placed(plan(Composed(budget), scene))) == rows


# --- case 5: half-computed prompts hold all memory and no decode remains

BUDGETS = [
    Static(4),
    Orca(4),
    PrefillFirst(512),
    Unified(256),
    ChunkedPrefill(256),
    TokenThrottling(),
    TokenThrottling2025(),
]
ADMISSIONS = [Always(), Watermark(0.02), FullPrompt(), MaxLength()]
VICTIMS = [LastArrived(), Largest(), LastArrived("swap"), Largest("swap")]


def name(choice):
    return f"{type(choice).__name__}{getattr(choice, 'how', '') and choice.how.value}"


def crowd(policy, stages, seed, requests=12, blocks=64):
    """All requests are there at once, each fits alone, and a few half-computed prompts fill the pool."""
    machine = Machine(policy, blocks=blocks, seed=seed, stages=stages, host_blocks=blocks // 2)
    rng = Random(seed)
    for _ in range(requests):
        machine.arrive(rng.randint(50, 600), rng.randint(5, 40), max_tokens=rng.randint(40, 200))
    return machine


def serve(machine, most=20_000):
    """Until everybody has ended; an empty step with nothing in flight is a stall."""
    for _ in range(most):
        while machine.step():
            pass
        if not machine.scheduler.live:
            return
        assert machine.flights, "stalled: nothing is in flight and nothing was placed"
        machine.back()
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("budget", BUDGETS, ids=name)
def test_case_5_no_composition_stalls(budget, stages):
    for admission, how in product(ADMISSIONS, VICTIMS):
        serve(crowd(Composed(budget, admission=admission, victims=how), stages, seed=1))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", [ChunkedPrefill(), TokenThrottling(), TokenThrottling2025()], ids=name)
def test_case_5_the_toy(budget, seed):
    """4 stages, MaxP 2048, all requests at once, 4k tokens of KV, prompts of 200 to 2500: gLLM's rules stall here."""
    machine = Machine(Composed(budget), blocks=250, seed=seed, stages=4)
    rng = Random(seed)
    for _ in range(40):
        machine.arrive(rng.randint(200, 2500), rng.randint(10, 80))
    serve(machine)


# --- case 6: a prompt longer than the cache


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(1600, 1, True), (1601, 1, False), (1000, 602, False)])
def test_case_6_what_can_never_fit_is_rejected_and_blocks_nobody(prompt, max_tokens, fits):
    # 100 blocks hold 1600 tokens; the last token needs none.
    machine = Machine(Composed(TokenThrottling2025(min_prefill=2048)), blocks=100)
    machine.arrive(prompt, output=1, max_tokens=max_tokens)
    machine.arrive(20, output=1)
    serve(machine)
    why = f"prompt {prompt} + max_tokens {max_tokens} needs 101 KV blocks, the pool has 100"
    assert machine.rejected == ({} if fits else {0: why})
    assert [ended.request.id for ended in machine.scheduler.ended] == [0, 1]


def test_case_7_prefill_first_may_squeeze_decodes_out_of_a_full_step():
    # 100 tokens a step. Paper's order: the chunk of 97 first, then 3 of 5 decodes.
    scene = Scene(max_tokens=100)
    for _ in range(5):
        scene.decodes()
    waiting = scene.waits(prompt=97 * 8)
    draft = plan(Composed(TokenThrottling()), scene)
    assert placed(draft) == {waiting.id: 97, 0: 1, 1: 1, 2: 1}
