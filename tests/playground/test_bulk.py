"""Verbs that do many things at once do what doing them one by one would."""

from unittest.mock import patch

from hypothesis import given, settings

from playground.core import MAIN
from playground.draft import Draft
from tests.playground.laws import simulate
from tests.playground.strategies import scenarios


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
