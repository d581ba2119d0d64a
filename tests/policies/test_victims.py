import pytest

from playground.draft import How
from policies.victims import Largest, LastArrived
from tests.policies.scene import Scene


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


@pytest.mark.parametrize("victims", [LastArrived(), Largest()])
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


@pytest.mark.parametrize("kind", [LastArrived, Largest])
def test_configurations_spell_out_how(kind):
    assert kind().how is How.RECOMPUTE
    assert kind("swap").how is How.SWAP
    with pytest.raises(ValueError, match=r"policy.victims.how=drop must be recompute or swap"):
        kind("drop")
