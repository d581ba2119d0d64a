"""Verbs that do many things at once do what doing them one by one would."""

from unittest.mock import patch

from hypothesis import given, settings

from playground.core import MAIN
from playground.draft import Draft
from playground.sequence import State
from tests.playground.laws import simulate
from tests.playground.strategies import scenarios
from tests.policies.scene import Scene


def one_by_one(draft, sequences, lane=MAIN):
    placed = 0
    for sequence in sequences:
        if not sequence.decoding or not draft.take(sequence, 1, lane):
            break
        placed += 1
    return placed


def watched(draft, sequences, lane=MAIN):
    """The one where it stops cannot be placed alone, either."""
    placed = TAKE_DECODES(draft, sequences, lane)
    for following in sequences[placed : placed + 1]:
        assert not following.decoding or not draft.take(following, 1, lane)
    return placed


TAKE_DECODES = Draft.take_decodes


@settings(max_examples=4 * settings.default.max_examples)
@given(scenarios())
def test_decodes_in_bulk(scenario):
    with patch.object(Draft, "take_decodes", watched):
        bulk = simulate(scenario)
    with patch.object(Draft, "take_decodes", one_by_one):
        single = simulate(scenario)
    assert bulk.steps == single.steps
    assert bulk.dones == single.dones
    assert bulk.events == single.events


def counted(draft, *arguments):
    """After every verb: what is looked up is what going through everybody finds."""
    answer = TAKE(draft, *arguments)
    running, spec = draft.running, draft.spec
    prefilling = [one for one in running if not one.decoding]
    assert draft.blocks_owed == sum(spec.blocks_for(one.length) - len(one.blocks) for one in prefilling)
    assert draft.due == [one for one in running if draft.ready(one)]
    assert draft.seats == spec.max_seqs - len(running) - sum(
        one.state is State.COPYING for one in draft._rank.limbo.values()
    )
    return answer


TAKE = Draft.take


@given(scenarios())
def test_what_is_kept_count_of_is_what_there_is(scenario):
    with patch.object(Draft, "take", counted):
        simulate(scenario)


def test_a_decode_named_twice_is_placed_once():
    scene = Scene()
    first, second = scene.decodes(), scene.decodes()
    draft = scene.draft()
    assert draft.take_decodes([second, second, first]) == 1
    assert [part.sequence for part in draft.slices] == [second.id]
    assert draft.take_decodes([first, second]) == 1


def test_a_decode_that_lost_its_memory_is_not_placed_in_bulk():
    scene = Scene()
    first, second, third = (scene.decodes() for _ in range(3))
    draft = scene.draft()
    draft.preempt(second)
    assert draft.take_decodes(draft.decoding[:]) == 1
    assert [part.sequence for part in draft.slices] == [first.id]
    assert draft.due == [third]
