"""A peer's run again, with its tables: the same batches at the same times."""

import pytest

from experiments.peers import vidur
from playground.sim.durations import Modelled


def test_keys_are_rounded_for_each_chunk():
    """No iteration of the run has two chunks with keys before them."""
    cost = vidur.cost_model()
    one, two = (vidur.Iteration(0, 0, chunks, 1.0).shape for chunks in (((10, 30), (20, 40)), ((64, 30), (64, 40))))
    assert cost.stage(one, 0) == cost.stage(two, 0)


@pytest.fixture(scope="module")
def ours():
    return vidur.replay(vidur.workload(), Modelled(vidur.cost_model()))


def test_the_formula_gives_every_iteration_its_time():
    assert len(vidur.recorded_iterations()) == 10_691
    assert vidur.worst_formula_error(vidur.cost_model()) < 6e-7


def test_latencies_agree_within_one_percent(ours):
    rows = list(vidur.table(ours.latencies(), vidur.recorded_latencies()))
    assert len(rows) == 15
    for metric, statistic, mine, its in rows:
        assert mine == pytest.approx(its, rel=0.01), f"{metric} {statistic}"
        # A promise of 1 % hides a mistake in one request of a hundred: what is found is far closer.
        assert mine == pytest.approx(its, rel=5e-4), f"{metric} {statistic}"


def test_the_one_difference_is_a_last_chunk_of_one_token(ours):
    requests, theirs = vidur.workload(), vidur.recorded_iterations()
    assert vidur.differing(ours.iterations, theirs) == 10
    alike = vidur.replay(requests, vidur.AsVidur(vidur.cost_model(), requests))
    assert vidur.differing(alike.iterations, theirs) == 0
    for metric, times in alike.latencies().items():
        assert times == pytest.approx(vidur.recorded_latencies()[metric], abs=1e-6), (
            metric
        )  # tables round to 1 ns a layer
