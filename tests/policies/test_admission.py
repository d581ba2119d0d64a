"""Each rule on both sides of its border. Blocks have 16 tokens."""

import pytest

from playground.draft import How
from policies.admission import Always, FullPrompt, MaxLength, Watermark
from tests.policies.scene import Scene


def free(scene, blocks):
    """Leave so many blocks free."""
    scene.fill(scene.rank.pool.free - blocks)


def test_always_says_yes_even_where_nothing_fits():
    scene = Scene(blocks=100)
    waiting = scene.waits(prompt=160)
    free(scene, 0)
    assert Always()(scene.draft(), waiting, 160)


@pytest.mark.parametrize(("blocks", "admitted"), [(15, True), (14, False)])
def test_watermark_leaves_a_share_of_the_pool(blocks, admitted):
    # 160 tokens fill 10 blocks, and 5 % of 100 blocks must stay: 10 + 5 = 15.
    scene = Scene(blocks=100)
    waiting = scene.waits(prompt=160)
    free(scene, blocks)
    assert Watermark(0.05)(scene.draft(), waiting, 160) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(11, True), (10, False)])
def test_watermark_is_rounded_down_to_blocks(blocks, admitted):
    # int(0.01 * 150) = 1, as in vLLM's and Sarathi-Serve's block managers: 10 + 1 = 11.
    scene = Scene(blocks=150)
    waiting = scene.waits(prompt=160)
    free(scene, blocks)
    assert Watermark(0.01)(scene.draft(), waiting, 160) is admitted


def test_watermark_asks_for_the_first_chunk_only():
    scene = Scene(blocks=100)
    waiting = scene.waits(prompt=1600)
    free(scene, 9)
    assert Watermark(0.05)(scene.draft(), waiting, 64)  # 4 blocks, 5 stay
    assert not Watermark(0.05)(scene.draft(), waiting, 65)  # 5 blocks, 4 stay


def with_cached_prefix(scene):
    """A waiting prompt of 10 blocks, the first 5 of which are in the cache, held by nobody."""
    hashes = tuple(range(10))
    first = scene.partial(160, 80, hashes=hashes)
    scene.rank.publish(first, 80)
    scene.rank.preempt(first)
    scene.rank.end(first)
    return scene.waits(prompt=160, hashes=hashes)


@pytest.mark.parametrize(("blocks", "admitted"), [(15, True), (14, False)])
def test_watermark_counts_cached_blocks_that_nobody_holds(blocks, admitted):
    # 5 cached blocks that are free now, 5 new ones, 5 to stay: using a free block up is using it up.
    scene = Scene(blocks=100)
    waiting = with_cached_prefix(scene)
    free(scene, blocks)
    draft = scene.draft()
    assert draft.prefix_hit(waiting) == 80
    assert Watermark(0.05)(draft, waiting, 80) is admitted


def test_watermark_does_not_count_cached_blocks_that_somebody_holds():
    scene = Scene(blocks=100)
    waiting = with_cached_prefix(scene)
    scene.rank.pool.share(scene.rank.hit(waiting))
    free(scene, 10)  # 5 new ones and 5 to stay
    assert Watermark(0.05)(scene.draft(), waiting, 80)
    assert not Watermark(0.06)(scene.draft(), waiting, 80)


def swapped(scene, context):
    """A sequence whose KV lies in the host's pool."""
    sequence = scene.decodes(context)
    draft = scene.draft()
    draft.preempt(sequence, How.SWAP)
    scene.rank.copied_out(sequence)
    return sequence


@pytest.mark.parametrize(("blocks", "admitted"), [(16, True), (15, False)])
def test_a_swapped_sequence_needs_its_blocks_and_one_for_its_next_token(blocks, admitted):
    # 160 tokens in 10 blocks are full: the next token takes an 11th, and 5 stay.
    scene = Scene(blocks=100, host_blocks=100)
    sequence = swapped(scene, 160)
    free(scene, blocks)
    assert Watermark(0.05)(scene.draft(), sequence, 1) is admitted
    assert FullPrompt(0.05)(scene.draft(), sequence, 1) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(30, True), (29, False)])
def test_full_prompt_reserves_for_the_whole_prompt_whatever_the_first_chunk(blocks, admitted):
    # 320 tokens: 20 blocks, and 10 % of 100 stay.
    scene = Scene(blocks=100)
    waiting = scene.waits(prompt=320)
    free(scene, blocks)
    assert FullPrompt(0.1)(scene.draft(), waiting, 16) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(46, True), (45, False)])
def test_full_prompt_leaves_what_admitted_prompts_still_need(blocks, admitted):
    # 320 tokens of which 64 are computed: 20 blocks wanted, 4 held, 16 owed. 16 + 20 + 10 = 46.
    scene = Scene(blocks=100)
    scene.partial(320, 64)
    waiting = scene.waits(prompt=320)
    free(scene, blocks)
    assert FullPrompt(0.1)(scene.draft(), waiting, 16) is admitted


def test_full_prompt_owes_nothing_to_decodes():
    scene = Scene(blocks=100)
    scene.decodes(160)  # full blocks: its next token takes one more, which is not reserved
    waiting = scene.waits(prompt=320)
    free(scene, 20)
    assert FullPrompt(0.0)(scene.draft(), waiting, 16)


@pytest.mark.parametrize(("prompt", "admitted"), [(540, True), (541, False)])
def test_max_length_reserves_the_longest_output_of_everybody(prompt, admitted):
    # The last token needs no KV. Running: 2 * (400 + 81 - 1 = 480 tokens = 30 blocks). Left: 40 blocks = 640 tokens,
    # which a prompt of 540 with 101 more tokens just fills.
    scene = Scene(blocks=100)
    scene.decodes(400, max_tokens=81)
    scene.partial(400, 16, max_tokens=81)
    waiting = scene.waits(prompt=prompt, max_tokens=101)
    assert MaxLength()(scene.draft(), waiting, 1) is admitted


@pytest.mark.parametrize("value", [-0.01, 1.0])
def test_a_share_of_the_pool_lies_between_0_and_1(value):
    with pytest.raises(ValueError, match=rf"policy.admission.fraction={value} must lie in \[0, 1\)"):
        Watermark(value)
    with pytest.raises(ValueError, match=rf"policy.admission.watermark={value} must lie in \[0, 1\)"):
        FullPrompt(value)
