"""Token throttling as the paper has it, worked by hand. MaxP 2048, MinP 32, T 8, threshold 0.05; 1000 blocks of 16."""

import pytest

from policies.budget import TokenThrottling
from policies.composed import Composed
from tests.policies.scene import Machine, Scene, placed, plan, victims


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [
        # WT decides: WP / 8 below MaxP and below what KV allows.
        (8000, 1.0, 1000),  # 8000 / 8
        (8007, 1.0, 1000),  # 1000.875: whole tokens
        (16000, 1.0, 2000),
        (100_000, 1.0, 2048),  # 12500, but MaxP
        # UT decides: (0.24 - 0.05) / 0.95 = 0.2; 0.2 * 2048 = 409.6. (0.525 - 0.05) / 0.95 = 0.5; 1024.
        (80_000, 0.24, 409),
        (80_000, 0.525, 1024),
        (8000, 0.525, 1000),  # WT again: 1000 < 1024
        # MinP holds both up: 100 / 8 = 12.5; (0.06 - 0.05) / 0.95 * 2048 = 21.6.
        (100, 1.0, 32),
        (80_000, 0.06, 32),
        # At the threshold UT is 0 and MinP holds; below it prefill is suspended.
        (80_000, 0.05, 32),
        (80_000, 0.049, 0),
        (100, 0.0, 0),
    ],
)
def test_equation_3(waiting, free, tokens):
    assert TokenThrottling().prefill(waiting, free) == tokens


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [
        (100, 1.0, 2048),  # eager: MaxP whatever waits
        (100, 0.24, 409),  # UT alone
        (100, 0.06, 32),
        (100, 0.049, 0),
    ],
)
def test_without_wt(waiting, free, tokens):
    assert TokenThrottling(wt=False).prefill(waiting, free) == tokens


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [
        (8000, 0.24, 1000),  # WT alone
        (100_000, 0.24, 2048),
        (100, 0.24, 32),
        (8000, 0.0, 1000),  # nor is it suspended
    ],
)
def test_without_ut(waiting, free, tokens):
    assert TokenThrottling(ut=False).prefill(waiting, free) == tokens


def test_without_either_it_is_a_fixed_prefill_budget():
    assert TokenThrottling(wt=False, ut=False).prefill(1, 0.0) == 2048


def test_other_settings():
    # T 4: 8000 / 4 = 2000, MaxP 512. Threshold 0.2: (0.68 - 0.2) / 0.8 * 512 = 307.2.
    policy = TokenThrottling(max_prefill=512, min_prefill=64, spread=4, kv_threshold=0.2)
    assert [policy.prefill(*at) for at in ((8000, 1.0), (8000, 0.68), (100, 1.0), (8000, 0.19))] == [512, 307, 64, 0]


# --- in a step


def throttled(**options):
    return Composed(TokenThrottling(**options))


def test_waiting_work_counts_prompts_in_the_queue_and_the_rest_of_those_under_way():
    # 3000 + 3000 + (4000 - 2000) = 8000; 8000 / 8 = 1000. F = 875 / 1000: (0.875 - 0.05) / 0.95 * 2048 = 1778.
    scene = Scene()
    partial = scene.partial(4000, 2000)
    scene.waits(prompt=3000), scene.waits(prompt=3000)
    assert placed(plan(throttled(), scene)) == {partial.id: 1000}


def test_kv_in_use_shrinks_the_chunk():
    # WP = 20000, so WT = 2500. 240 of 1000 blocks free: 409.6.
    scene = Scene()
    first, *_ = [scene.waits(prompt=4000) for _ in range(5)]
    scene.fill(760)
    assert placed(plan(throttled(), scene)) == {first.id: 409}


@pytest.mark.parametrize(("used", "prefill"), [(943, 32), (944, 0)])
def test_prefill_stops_below_the_threshold_while_decodes_go_on(used, prefill):
    # The decode holds 7 blocks. 1000 - 943 - 7 = 50: F = 0.05, at the threshold. With one block less, below it.
    scene = Scene()
    decode = scene.decodes(100)
    waiting = scene.waits(prompt=4000)
    scene.fill(used)
    assert placed(plan(throttled(), scene)) == ({waiting.id: prefill} if prefill else {}) | {decode.id: 1}


def test_prefill_is_placed_before_decodes():
    scene = Scene()
    decode, waiting = scene.decodes(), scene.waits(prompt=10)
    assert list(placed(plan(throttled(), scene))) == [waiting.id, decode.id]


@pytest.mark.parametrize(
    ("decodes", "stages", "share"),
    [(8, 4, 2), (9, 4, 3), (5, 4, 2), (4, 4, 1), (3, 4, 1), (1, 4, 1), (9, 2, 5), (9, 1, 9)],
)
def test_equation_4_rounded_up(decodes, stages, share):
    scene = Scene(stages=stages)
    for _ in range(decodes):
        scene.decodes()
    assert len(placed(plan(throttled(), scene))) == share


def test_decodes_in_flight_count_and_prompts_do_not():
    # 7 decodes, 4 of them in flight: 7 / 4 -> 2, where the 3 that are ready would be 3 / 4 -> 1.
    # Two more whose recomputation is under way do not decode: 9 / 4 -> 3 would be wrong.
    scene = Scene(stages=4)
    flying = [scene.decodes(returned=2) for _ in range(4)]
    scene.decodes(), scene.decodes(), scene.decodes()
    scene.flies(*flying)
    recomputed = [scene.partial(1000, 100) for _ in range(2)]
    for sequence in recomputed:
        sequence.promised = sequence.returned = 5
        sequence.length += 5
    scene.fill(scene.rank.pool.free - 40)  # below the threshold: decodes only
    assert len(placed(plan(throttled(), scene))) == 2


def test_a_prompt_that_ends_in_this_step_is_no_decode_yet():
    # 8 / 4 = 2; with the prompt of 20 tokens, which this step completes, it would be 9 / 4 -> 3.
    scene = Scene(stages=4)
    for _ in range(8):
        scene.decodes()
    waiting = scene.waits(prompt=20)
    assert list(placed(plan(throttled(), scene)).values()) == [20, 1, 1]
    assert waiting.promised == 1


def test_those_served_longest_ago_are_next():
    scene = Scene(stages=2)
    sequences = [scene.decodes() for _ in range(4)]
    for sequence, step in zip(sequences, (7, 5, 6, 5), strict=True):
        sequence.step = step
    assert list(placed(plan(throttled(), scene))) == [sequences[1].id, sequences[3].id]


def test_a_decode_without_a_block_takes_the_youngests():
    scene = Scene(blocks=100)
    old, young = scene.decodes(160), scene.decodes(160)
    scene.fill(80)
    draft = plan(throttled(), scene)
    assert (placed(draft), victims(draft)) == ({old.id: 1}, [young.id])


def test_prompts_through_a_pipeline_of_four():
    """Four prompts of 1000 tokens, KV all but free: WT decides. WP is what no step has asked for."""
    machine = Machine(throttled(), stages=4)
    machine.arrive(prompt=1000, output=10, count=4)
    assert machine.step() == {0: 500}  # 4000 / 8
    assert machine.step() == {0: 437}  # 3500 / 8 = 437.5
    assert machine.step() == {0: 63, 1: 319}  # 3063 / 8 = 382.9: the first one's last 63, and 382 - 63
    assert machine.step() == {1: 335}  # 2681 / 8 = 335.1; one decode (0) for 4 stages, but it is in flight
    assert machine.step() == {}  # four are in flight
    machine.back()
    assert machine.step() == {1: 293}  # 2346 / 8 = 293.3
    machine.back()
    assert machine.step() == {1: 53, 2: 203}  # 2053 / 8 = 256.6
    machine.back()  # the step that ended prompt 0: its first token is known
    assert machine.step() == {2: 224, 0: 1}  # 1797 / 8 = 224.6; decodes 0 and 1: 2 / 4 -> 1
    machine.back()
    assert machine.step() == {2: 196}  # 1573 / 8 = 196.6; 0 is in flight, as is 1
    machine.back()
    assert machine.step() == {2: 172}  # 1377 / 8 = 172.1
    machine.back()  # the step that ended prompt 1
    assert machine.step() == {2: 150, 1: 1}  # 1205 / 8 = 150.6
    machine.back()  # 0's second token
    assert machine.step() == {2: 55, 3: 76, 0: 1}  # 1055 / 8 = 131.9: the third one's last 55, and 131 - 55


def test_decodes_spread_over_a_pipeline_of_four():
    """Ten prompts of 16 tokens, two a step (MinP 32), then decodes only: 10 / 4 -> 3 a step, all if fewer are ready."""
    machine = Machine(throttled(), stages=4)
    machine.arrive(prompt=16, output=50, count=10)
    assert [machine.step() for _ in range(4)] == [{0: 16, 1: 16}, {2: 16, 3: 16}, {4: 16, 5: 16}, {6: 16, 7: 16}]
    machine.back()
    assert machine.step() == {8: 16, 9: 16, 0: 1, 1: 1}  # 8 decodes / 4 = 2
    machine.back()
    assert machine.step() == {2: 1, 3: 1}  # 3 wanted, 2 ready
    machine.back()
    assert machine.step() == {4: 1, 5: 1}
    machine.back()
    assert machine.step() == {6: 1, 7: 1}
    machine.back()
    assert machine.step() == {0: 1, 1: 1, 8: 1}  # 0, 1, 8 and 9 came back together: in order of admission
    machine.back()
    assert machine.step() == {9: 1, 2: 1, 3: 1}  # 9 was served longest ago
    machine.back()
    assert machine.step() == {4: 1, 5: 1}
    machine.back()
    assert machine.step() == {6: 1, 7: 1}


def test_kv_ramps_prefill_down_to_the_floor_and_then_stops_it():
    """760 of 1000 blocks are held and nothing comes free: UT decides. WP / 8 stays above 2000."""
    scene = Scene(stages=4)
    prompt = scene.waits(prompt=20_000)
    scene.fill(760)
    budget = throttled()
    assert placed(plan(budget, scene)) == {prompt.id: 409}  # F 0.240: 0.190 / 0.95 * 2048 = 409.6
    assert placed(plan(budget, scene)) == {prompt.id: 353}  # 26 blocks later, F 0.214: 0.164 / 0.95 * 2048 = 353.6
    assert placed(plan(budget, scene)) == {
        prompt.id: 306
    }  # 762 tokens, 48 blocks, F 0.192: 0.142 / 0.95 * 2048 = 306.1
    assert placed(plan(budget, scene)) == {prompt.id: 265}  # 1068 tokens, 67 blocks, F 0.173: 265.2
    assert placed(plan(budget, scene)) == {prompt.id: 228}  # 1333 tokens, 84 blocks, F 0.156: 228.5
    scene.flies(prompt)  # or an idle rank would go on
    chunks = [placed(plan(budget, scene)).get(prompt.id, 0) for _ in range(40)]
    assert chunks[-10:] == [0] * 10
    assert chunks[chunks.index(0) - 1] == 32
    assert 0.05 - 0.002 <= scene.draft().kv_free < 0.05  # 32 tokens are 2 blocks


@pytest.mark.parametrize("option", ["max_prefill", "min_prefill", "spread"])
def test_settings_must_be_positive(option):
    with pytest.raises(ValueError, match=f"policy.budget.{option}=0 must be at least 1"):
        TokenThrottling(**{option: 0})


def test_the_threshold_is_a_share():
    with pytest.raises(ValueError, match=r"policy.budget.kv_threshold=1.0 must lie in \[0, 1\)"):
        TokenThrottling(kv_threshold=1.0)
