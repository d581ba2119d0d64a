"""Merged steps taken apart, held against the trace's own `expand`, which goes row by row."""

from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings

from analysis.repetitions import apart
from playground.trace import expand, read
from tests.playground.strategies import scenarios
from tests.playground.test_laws import traced

SHOWN = ["group", "planned", "started", "finished", "blocks_free", "stage_started", "stage_finished"]


@settings(max_examples=2 * settings.default.max_examples)
@given(scenarios())
def test_taken_apart_they_are_the_rows_that_expanding_gives(scenario):
    size = scenario.spec.block_size
    with TemporaryDirectory() as folder:
        traced(scenario.but(spec=replace(scenario.spec, repeats=True)), folder)
        found = apart(read(folder, "steps").to_pandas(), read(folder, "slices").to_pandas(), size)
        expected = expand(folder, size)[0].to_pandas()
    assert rows(found) == rows(expected)


def rows(steps) -> list[tuple]:
    """In order of time; a list that is missing is empty."""
    return sorted([tuple(list(x) if isinstance(x, np.ndarray) else x or 0 for x in row) for row in steps[SHOWN].values])
