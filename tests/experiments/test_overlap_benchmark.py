"""The benchmark of overlap: what a round is, and what its numbers mean."""

from contextlib import closing

import pytest

from engine.backend import TorchBackend
from engine.load import load_model
from engine.tiny import tiny
from experiments.benchmarks.overlap import APART, DECODES, SEQUENCES, Times, _row, played, table


def test_rounds_follow_one_another_on_the_same_blocks():
    sizes = dict(blocks=SEQUENCES * -(-(16 + DECODES + 1) // 16), max_seqs=SEQUENCES, max_tokens=SEQUENCES * 16)
    with closing(TorchBackend(load_model(tiny("llama")), **sizes)) as backend:
        rounds = [played(backend, number, 16) for number in range(2)]
    assert all(min(times) > 0 for times in rounds)
    assert not backend._runner._sequences  # all have ended


def test_a_way_is_compared_with_no_overlap_and_with_no_exchange_of_its_own_round():
    found = {
        "none": [Times(4.0, 1.0), Times(8.0, 1.0), Times(2.0, 1.0)],
        "two_batch": [Times(2.0, 2.0), Times(8.0, 2.0), Times(3.0, 2.0)],
        APART: [Times(1.0, 1.0), Times(2.0, 1.5), Times(2.0, 1.0)],
    }
    row = _row("two ranks", "prefill", "two_batch", found)
    assert (row.ms, row.ratio, row.ratios) == (3000.0, 1.0, (0.5, 1.0, 1.5))
    assert row.exposed == pytest.approx(0.5)
    del found[APART]
    assert _row("one rank", "decode", "two_batch", found).exposed is None
    assert "two_batch" in table([row]) and "50%" in table([row])
