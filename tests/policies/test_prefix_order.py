"""Orders that look into the prefix cache: blocks of 16 tokens, the clock at 10 seconds."""

import pytest

from playground.draft import How
from policies.order import Fcfs
from policies.prefix import Hrrn, LongestPrefix, ShortestPrefill
from tests.policies.scene import Scene


def cached(scene, family, tokens):
    """A prompt whose first tokens others may find."""
    owner = scene.partial(tokens + 16, tokens, hashes=chain(family, tokens + 16))
    scene.rank.publish(owner, tokens)


def chain(family, tokens):
    return tuple(family * 1000 + place for place in range(tokens // 16))


def ids(order, scene):
    return [sequence.id for sequence in order(scene.draft())]


def test_the_longest_match_comes_first_and_equals_in_order():
    scene = Scene()
    cached(scene, family=1, tokens=160), cached(scene, family=2, tokens=320)
    none, short, long, again = (
        scene.waits(prompt=400, hashes=hashes).id
        for hashes in ((), chain(1, 400), chain(2, 400), chain(1, 320) + chain(7, 80))
    )
    assert ids(LongestPrefix(), scene) == [long, short, again, none]


def test_of_those_that_share_what_nobody_has_cached_one_goes_and_the_others_wait():
    # 32 tokens in common are enough, 16 are not: the first two blocks decide.
    scene = Scene()
    first, twin, cousin, other = (
        scene.waits(prompt=96, hashes=hashes).id
        for hashes in (chain(1, 96), chain(1, 96), chain(1, 16) + chain(8, 80), chain(3, 96))
    )
    assert ids(LongestPrefix(), scene) == [first, cousin, other, twin]
    assert ids(LongestPrefix(shared=48), scene)[-1] == twin
    assert ids(LongestPrefix(shared=112), scene) == [first, twin, cousin, other]


def test_those_whose_prefix_is_cached_do_not_wait_for_one_another():
    scene = Scene()
    cached(scene, family=1, tokens=48)
    first, twin = (scene.waits(prompt=96, hashes=chain(1, 96)).id for _ in range(2))
    other = scene.waits(prompt=96, hashes=chain(3, 96)).id
    assert ids(LongestPrefix(), scene) == [first, twin, other]


def test_with_too_many_waiting_it_is_first_come_first_served():
    scene = Scene()
    cached(scene, family=1, tokens=160)
    first = scene.waits(prompt=400)
    match = scene.waits(prompt=400, hashes=chain(1, 400))
    assert ids(LongestPrefix(fallback=2), scene) == [match.id, first.id]
    assert ids(LongestPrefix(fallback=1), scene) == ids(Fcfs(), scene) == [first.id]
    assert ids(Hrrn(fallback=1), scene) == [first.id]


def test_nobody_is_looked_up_while_no_seat_is_free():
    scene = Scene(max_seqs=1)
    scene.decodes(), scene.waits()
    assert ids(LongestPrefix(), scene) == ids(Hrrn(), scene) == ids(ShortestPrefill(), scene) == []


def test_the_shortest_prefill_is_that_of_which_least_is_not_cached():
    # To compute: 400, 100, 400 - 320 = 80, and 112 of a twin that shares its 112 with nobody yet: last with the other.
    scene = Scene()
    cached(scene, family=1, tokens=320)
    long, short, match, first, twin = (
        scene.waits(prompt=prompt, hashes=hashes).id
        for prompt, hashes in ((400, ()), (100, ()), (400, chain(1, 400)), (112, chain(5, 112)), (64, chain(5, 64)))
    )
    assert ids(ShortestPrefill(), scene) == [match, short, first, long, twin]
    assert ids(ShortestPrefill(fallback=4), scene) == [twin, short, first, long, match]  # too many: whole prompts


@pytest.mark.parametrize("fallback", [128, 1])
def test_ageing_lets_a_long_prompt_through(fallback):
    # 400 tokens at 0 s against 100 at 3 s: at 100 tokens a second they are equal, and the first in the queue goes.
    for ageing, order in ((0.0, [1, 0]), (99.0, [1, 0]), (100.0, [0, 1]), (101.0, [0, 1])):
        scene = Scene()
        scene.waits(prompt=400, arrival=0.0), scene.waits(prompt=100, arrival=3.0)
        assert ids(ShortestPrefill(ageing=ageing, fallback=fallback), scene) == order


def test_what_was_sampled_before_a_preemption_is_to_be_computed_again():
    scene = Scene(prefix_cache=False)
    victim = scene.decodes(200, returned=150)
    scene.draft().preempt(victim)
    short = scene.waits(prompt=150).id
    assert ids(ShortestPrefill(), scene) == [short, victim.id]


def test_the_response_ratio_weighs_waiting_against_what_is_to_be_prefilled():
    # Waited by tokens: 10 s / 400, 4 s / 100, 9 s / (400 - 160) as its prefix is cached.
    scene = Scene()
    cached(scene, family=1, tokens=160)
    long = scene.waits(prompt=400, arrival=0.0).id  # 0.025
    short = scene.waits(prompt=100, arrival=6.0).id  # 0.04
    match = scene.waits(prompt=400, arrival=1.0, hashes=chain(1, 400)).id  # 0.0375
    assert ids(Hrrn(), scene) == [short, match, long]


def test_a_swapped_sequence_has_all_its_tokens_already():
    for order in (LongestPrefix(), Hrrn(), ShortestPrefill(), ShortestPrefill(fallback=1)):
        scene = Scene(host_blocks=100)
        victim = scene.decodes(160)
        scene.draft().preempt(victim, How.SWAP)
        scene.rank.copied_out(victim)
        scene.waits(prompt=16, arrival=0.0)
        scene.rank.waiting.move_to_end(victim.id)
        assert ids(order, scene)[0] == victim.id


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LongestPrefix(fallback=-1), "policy.order.fallback=-1"),
        (lambda: Hrrn(shared=0), "policy.order.shared=0"),
        (lambda: ShortestPrefill(fallback=-1), "policy.order.fallback=-1"),
        (lambda: ShortestPrefill(ageing=-1), "policy.order.ageing=-1 must be 0 .none. or more tokens a second"),
    ],
)
def test_options_out_of_range_are_named(make, told):
    with pytest.raises(ValueError, match=told):
        make()
