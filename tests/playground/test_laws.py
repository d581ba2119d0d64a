"""DESIGN's laws, for every composition of policies, on workloads and devices that are small enough to break often."""

from hypothesis import given, settings

from tests.playground.laws import simulate
from tests.playground.strategies import scenarios

MANY = settings(max_examples=8 * settings.default.max_examples)


@MANY
@given(scenarios())
def test_every_law_for_every_composition(scenario):
    simulate(scenario)
