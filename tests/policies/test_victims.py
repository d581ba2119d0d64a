import pytest

from playground.draft import How
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.victims import Cheaper, Largest, LastArrived, LeastProgress, LeastRecompute, LowestPriority
from tests.policies.scene import Scene, plan


def test_the_youngest_gives_way_in_whatever_order_they_were_admitted():
    scene = Scene()
    scene.decodes(arrival=1.0)
    youngest = scene.decodes(arrival=3.0)
    needy = scene.decodes(arrival=2.0)
    assert LastArrived()(scene.draft(), needy) is youngest


def test_among_those_that_arrived_together_the_last_number_gives_way():
    scene = Scene()
    needy, second = scene.decodes(arrival=1.0), scene.decodes(arrival=1.0)
    assert LastArrived()(scene.draft(), needy) is second


def test_the_needy_one_gives_way_itself_if_it_is_the_youngest():
    scene = Scene()
    scene.decodes()
    needy = scene.decodes()
    assert LastArrived()(scene.draft(), needy) is needy


def test_a_half_computed_prompt_may_be_the_victim():
    scene = Scene()
    needy, partial = scene.decodes(), scene.partial(1000, 500)
    assert LastArrived()(scene.draft(), needy) is partial


@pytest.mark.parametrize("victims", [LastArrived(), Largest(), LeastProgress(), LowestPriority()])
def test_one_in_flight_is_spared_as_long_as_others_are_idle(victims):
    scene = Scene()
    needy = scene.decodes(16)
    flying = scene.decodes(1600, returned=2)
    scene.flies(flying)
    assert victims(scene.draft(), needy) is needy


@pytest.mark.parametrize("victims", [LastArrived(), Largest()])
def test_with_all_in_flight_the_rule_decides_among_all(victims):
    scene = Scene(forwards_tokens=True)
    needy, last = scene.decodes(16, returned=2), scene.decodes(160, returned=2)
    scene.flies(needy, last)
    assert victims(scene.draft(), needy) is last


def test_the_largest_has_most_blocks():
    scene = Scene()
    needy = scene.decodes(100)  # 7 blocks
    largest = scene.partial(2000, 113)  # 8
    scene.decodes(112)  # 7
    assert Largest()(scene.draft(), needy) is largest


def test_among_equally_large_ones_the_youngest_gives_way():
    scene = Scene()
    scene.decodes(100, arrival=1.0)
    youngest = scene.decodes(100, arrival=3.0)
    needy = scene.decodes(100, arrival=2.0)
    assert Largest()(scene.draft(), needy) is youngest


@pytest.mark.parametrize("kind", [LastArrived, Largest, LeastProgress, LeastRecompute, LowestPriority])
def test_configurations_spell_out_how(kind):
    assert kind().how is How.RECOMPUTE
    assert kind("swap").how is How.SWAP
    with pytest.raises(ValueError, match=r"policy.victims.how=drop must be recompute or swap"):
        kind("drop")


# --- progress, cost, priority


def test_the_one_that_sampled_least_gives_way():
    scene = Scene()
    needy = scene.decodes(returned=5, arrival=9.0)
    least = scene.decodes(returned=3, arrival=1.0)
    scene.decodes(returned=4, arrival=8.0)
    assert LeastProgress()(scene.draft(), needy) is least


def test_among_those_with_equal_progress_the_longest_prompt_gives_way_then_the_youngest():
    scene = Scene()
    needy, long = scene.decodes(100, arrival=9.0), scene.decodes(200, arrival=1.0)
    assert LeastProgress()(scene.draft(), needy) is long
    young = scene.decodes(200, arrival=2.0)
    assert LeastProgress()(scene.draft(), needy) is young


def test_the_one_with_the_fewest_tokens_to_compute_again_gives_way():
    scene = Scene()
    needy = scene.decodes(101, arrival=9.0)
    least = scene.partial(2000, 100, arrival=1.0)
    assert LeastRecompute()(scene.draft(), needy) is least
    young = scene.partial(300, 100, arrival=2.0)
    assert LeastRecompute()(scene.draft(), needy) is young


def test_the_lowest_priority_gives_way_and_the_youngest_of_it():
    scene = Scene()
    needy = scene.decodes(arrival=9.0)
    low = scene.decodes(priority=2, arrival=1.0)
    scene.decodes(priority=1, arrival=10.0)
    assert LowestPriority()(scene.draft(), needy) is low
    young = scene.decodes(priority=2, arrival=2.0)
    assert LowestPriority()(scene.draft(), needy) is young


def test_a_needy_one_of_the_lowest_priority_gives_way_itself():
    scene = Scene()
    scene.decodes(arrival=5.0)
    needy = scene.decodes(priority=1, arrival=1.0)
    assert LowestPriority()(scene.draft(), needy) is needy


# --- swap or recompute


def seconds(**options):
    """A victim of 160 tokens, 10 blocks: out and in are 320 tokens of 100 bytes, 32 kB."""
    return Cheaper(token_bytes=100.0, recompute_pair=0.0, **options)


@pytest.mark.parametrize(("recompute", "how"), [(2.01e-6, How.SWAP), (2.0e-6, How.RECOMPUTE)])
def test_kv_is_swapped_if_both_copies_are_cheaper_than_its_tokens(recompute, how):
    # 32,000 bytes / 1e8 = 320 us = 160 x 2 us.
    scene = Scene(host_blocks=100)
    victim = scene.decodes(160)
    assert seconds(bandwidth=1e8, recompute=recompute)(scene.draft(), victim) is how


@pytest.mark.parametrize(("copy", "how"), [(0.9e-5, How.SWAP), (1.0e-5, How.RECOMPUTE)])
def test_each_copy_takes_a_while_to_begin(copy, how):
    # 320 us + 2 x 10 us = 160 x 2.125 us.
    scene = Scene(host_blocks=100)
    victim = scene.decodes(160)
    assert seconds(bandwidth=1e8, recompute=2.125e-6, copy=copy)(scene.draft(), victim) is how


@pytest.mark.parametrize(("pair", "how"), [(3.2e-8, How.SWAP), (3.1e-8, How.RECOMPUTE)])
def test_attention_grows_with_the_square(pair, how):
    # 160^2 / 2 = 12,800 pairs x 2.5e-8 = 320 us; 3.1e-8: 397 us, beside copies of 400 us.
    scene = Scene(host_blocks=100)
    victim = scene.decodes(160)
    rule = Cheaper(token_bytes=100.0, bandwidth=8e7, recompute=0.0, recompute_pair=pair)
    assert rule(scene.draft(), victim) is how


def test_a_copy_waits_for_those_on_their_way_out():
    # Alone 320 us < 400 us; behind 10 blocks more, 16 kB or 160 us, it is 480 us.
    scene = Scene(host_blocks=100)
    first, second = scene.decodes(160), scene.decodes(160)
    rule = seconds(bandwidth=1e8, recompute=2.5e-6)
    draft = scene.draft()
    assert rule(draft, second) is How.SWAP
    draft.preempt(first, How.SWAP)
    assert rule(draft, second) is How.RECOMPUTE


@pytest.mark.parametrize(("bandwidth", "how"), [(1e12, How.SWAP), (1.0, How.RECOMPUTE)])
def test_a_composition_does_what_is_cheaper(bandwidth, how):
    scene = Scene(blocks=20, host_blocks=20)
    scene.decodes(160), scene.decodes(160)
    policy = Composed(ChunkedPrefill(), victims=LastArrived(Cheaper(bandwidth=bandwidth)))
    assert [victim.how for victim in plan(policy, scene).preempted] == [how]


def test_what_cannot_be_swapped_is_computed_again():
    scene = Scene(blocks=20, host_blocks=5)
    scene.decodes(160), scene.decodes(160)
    policy = Composed(ChunkedPrefill(), victims=LastArrived(Cheaper(bandwidth=1e12)))
    assert [victim.how for victim in plan(policy, scene).preempted] == [How.RECOMPUTE]


@pytest.mark.parametrize("name", ["token_bytes", "copy", "recompute", "recompute_pair"])
def test_costs_are_not_negative(name):
    with pytest.raises(ValueError, match=rf"policy.victims.how.{name}=-1 must be 0 or more"):
        Cheaper(**{name: -1})


def test_a_link_has_a_bandwidth():
    with pytest.raises(ValueError, match=r"policy.victims.how.bandwidth=0 must be above 0 bytes a second"):
        Cheaper(bandwidth=0)
