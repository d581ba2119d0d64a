"""Room for what may still be sampled, worked by hand. Blocks have 16 tokens."""

import pytest

from playground.draft import Draft
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.reserve import DecodeReserve, NewTokenRatio, reserved_blocks
from tests.policies.scene import Machine, Scene


def free(scene, blocks):
    """Leave so many blocks free."""
    scene.fill(scene.rank.pool.free - blocks)


def later(scene, steps):
    """So many steps go by."""
    scene.ordinal += steps
    return scene.draft()


# --- SGLang's ratio


@pytest.mark.parametrize(("blocks", "admitted"), [(26, True), (25, False)])
def test_a_new_prompt_fits_to_its_end_beside_a_share_of_what_runs(blocks, admitted):
    # Running: 101 - 1 tokens left, 0.7 of them: 70. New: 160 in 10 blocks, 170 more. F - 10 blocks > 170 + 70 = 240:
    # 16 blocks hold 256 > 240; 15 hold 240, which is not more.
    scene = Scene()
    scene.decodes(160, max_tokens=101)
    waiting = scene.waits(prompt=160, max_tokens=170)
    free(scene, blocks)
    assert NewTokenRatio()(scene.draft(), waiting, 160) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(28, True), (27, False)])
def test_who_is_being_prefilled_counts_whole(blocks, admitted):
    # 320 tokens of which 160 are computed: 10 blocks owed, and all of its 100. New: 5 blocks, 100 more.
    # 28 - 5 - 10 = 13 blocks = 208 > 200.
    scene = Scene()
    scene.partial(320, 160, max_tokens=100)
    waiting = scene.waits(prompt=80, max_tokens=100)
    free(scene, blocks)
    assert NewTokenRatio()(scene.draft(), waiting, 80) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(14, True), (13, False)])
def test_what_may_come_is_clipped(blocks, admitted):
    # Running: min(9,999, 100) x 0.7 = 70. New: 16 tokens in 1 block, 100 more. 13 blocks = 208 > 170; 11 do, 10 do not.
    scene = Scene()
    scene.decodes(16, max_tokens=10_000)
    waiting = scene.waits(prompt=16, max_tokens=10_000)
    free(scene, blocks - 2)
    assert NewTokenRatio(clip=100)(scene.draft(), waiting, 16) is admitted


def test_the_ratio_falls_to_a_share_of_where_it_began_within_600_steps():
    scene, rule = Scene(), NewTokenRatio()
    scene.decodes()
    assert rule.ratio(scene.draft()) == 0.7
    # 0.7 x 0.14 = 0.098; (0.7 - 0.098) / 600 a step.
    assert rule.ratio(later(scene, 300)) == pytest.approx(0.399)
    assert rule.ratio(later(scene, 299)) == pytest.approx(0.098 + 0.602 / 600)
    assert rule.ratio(later(scene, 5000)) == pytest.approx(0.098)


def test_conservativeness_scales_the_ratio_up_to_one():
    assert NewTokenRatio(conservativeness=0.5).ratio(Scene().draft()) == 0.35
    assert NewTokenRatio(conservativeness=3.0).ratio(Scene().draft()) == 1.0


def test_at_a_preemption_the_ratio_is_what_the_others_have_sampled_and_20_more():
    scene, rule = Scene(), NewTokenRatio()
    scene.decodes(returned=40, max_tokens=100), scene.decodes(returned=10, max_tokens=200)
    rule.preempted(scene.draft())
    # (40 + 10 + 2 x 20) / (300 + 1)
    assert rule.ratio(scene.draft()) == pytest.approx(90 / 301)
    assert rule.ratio(later(scene, 10)) == pytest.approx(90 / 301 - 10 * 0.602 / 600)
    for _ in range(2):
        scene.decodes(returned=50, max_tokens=50)
    rule.preempted(scene.draft())
    assert rule.ratio(scene.draft()) == pytest.approx(min(1, (150 + 80) / 401))


def test_an_idle_rank_starts_anew():
    scene, rule = Scene(), NewTokenRatio()
    rule.ratio(scene.draft())
    assert rule.ratio(later(scene, 400)) == 0.7
    scene.decodes()
    assert rule.ratio(later(scene, 60)) == pytest.approx(0.7 - 0.0602)


# --- gLLM's reserve


def test_the_reserve_is_in_blocks_for_each_decode():
    # int(0.5 x 99) = 49 more tokens; 100 tokens leave 12 free in 7 blocks: 37 tokens, 3 blocks.
    # 112 tokens fill 7 blocks: int(0.5 x 60) = 30, 2 blocks. int(0.5 x 20) = 10 < 12: none. A prompt: none.
    scene = Scene()
    scene.decodes(100, max_tokens=100), scene.decodes(112, max_tokens=61), scene.decodes(100, max_tokens=21)
    scene.partial(500, 100)
    assert reserved_blocks(scene.draft().running, 0.5, 16) == 5
    assert DecodeReserve(init=0.5).reserve(scene.draft()) == 5


@pytest.mark.parametrize(("blocks", "admitted"), [(15, True), (14, False)])
def test_the_first_chunk_leaves_the_reserve(blocks, admitted):
    # int(0.7 x 100) = 70, 5 blocks of 80; the chunk of 160 takes 10.
    scene = Scene()
    scene.decodes(160, max_tokens=101)
    waiting = scene.waits(prompt=1600)
    free(scene, blocks)
    assert DecodeReserve()(scene.draft(), waiting, 160) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(14, True), (13, False)])
def test_at_least_one_block_a_stage_is_kept(blocks, admitted):
    scene = Scene(stages=4)
    waiting = scene.waits(prompt=160)
    free(scene, blocks)
    assert DecodeReserve()(scene.draft(), waiting, 160) is admitted


def test_the_reserve_rises_once_however_many_gave_way_and_falls_by_steps():
    scene, rule = Scene(), DecodeReserve()
    young = [scene.decodes() for _ in range(2)]
    assert rule.ratio(scene.draft()) == 0.7
    assert rule.ratio(later(scene, 100)) == pytest.approx(0.5)
    draft = scene.draft()
    for sequence in young:
        draft.preempt(sequence)
    rule.preempted(draft)
    assert rule.ratio(scene.draft()) == pytest.approx(0.55)
    assert rule.ratio(later(scene, 1000)) == 0.1
    for _ in range(100):
        rule.preempted(draft)
    assert rule.ratio(draft) == 1.0


# --- both


def test_a_composition_tells_its_admission_of_victims():
    # Prompts of 32 and answers of 60 tokens, 30 blocks of 4: both grow to 15 blocks, and the first one's next token
    # drives the second out. 60 tokens of KV: the 29th token is sampled, and the 30th is placed. (30 + 20) / (60 + 1)
    rule = NewTokenRatio(init=0.1, clip=10)
    machine = Machine(Composed(ChunkedPrefill(), admission=rule), blocks=30, block_size=4)
    machine.arrive(32, output=60, count=2)
    for _ in range(40):
        machine.turn()
        if machine.preempted:
            break
    assert machine.preempted == [1]
    (rank,) = machine.scheduler.ranks
    draft = Draft(rank, machine.spec, 99.0, None, (), 30)
    assert rule.ratio(draft) == 50 / 61


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init": 0}, r"policy.admission.init=0 must lie in \(0, 1\]"),
        ({"floor": 1.5}, r"policy.admission.floor=1.5 must lie in \(0, 1\]"),
        ({"conservativeness": 0}, "policy.admission.conservativeness=0 must be above 0; 1 is usual"),
        ({"decay_steps": 0}, "policy.admission.decay_steps=0 must be at least 1"),
        ({"clip": 0}, "policy.admission.clip=0 must be at least 1"),
        ({"lookahead": -1}, "policy.admission.lookahead=-1 must be 0 or more tokens"),
    ],
)
def test_what_a_ratio_may_be(options, said):
    with pytest.raises(ValueError, match=said):
        NewTokenRatio(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init": 1.1}, r"policy.admission.init=1.1 must lie in \[0, 1\]"),
        ({"floor": -0.1}, r"policy.admission.floor=-0.1 must lie in \[0, 1\]"),
        ({"rise": -1}, r"policy.admission.rise=-1 must be 0 \(never\) or more"),
        ({"fall": -1}, r"policy.admission.fall=-1 must be 0 \(never\) or more"),
    ],
)
def test_what_a_reserve_may_be(options, said):
    with pytest.raises(ValueError, match=said):
        DecodeReserve(**options)
