"""Inputs that travel before a step's kernels or in a lane of their own, worked out by hand. One unit is a second."""

from dataclasses import replace

import pytest

from playground.core import COPY_IN, MAIN, Columns, Copy, Spec, Step
from playground.sim.backend import SimBackend
from playground.sim.cluster import Cluster
from playground.sim.durations import LaneTimes, StepTimes, Work
from playground.sim.fabric import Fabric
from playground.sim.processor import Kernels
from playground.sim.upload import Upload, Uploaded, input_bytes, with_uploads
from tests.playground.test_cost import DEVICE
from tests.playground.test_sim import completions, part, step, times
from tests.playground.test_sim_cluster_system import LINKS

SLOW = replace(DEVICE, host_latency=0.5, host_bandwidth=56.0, host_fraction=1.0)
"""The inputs of one decode with 8 tokens before it, in blocks of 1 (20 + 4 x 9 bytes), take 0.5 + 1 s."""


class Table:
    def __init__(self, *works) -> None:
        self._works = works

    def of(self, step) -> StepTimes:
        lanes = {MAIN: LaneTimes((self._works[step.id],))} if step.slices else {}
        return StepTimes(0.0, lanes | {copy.lane: LaneTimes((3.0,)) for copy in step.copies})


def backend(uploads: str, *works) -> SimBackend:
    build = Fabric(Cluster(LINKS))
    durations = Uploaded(Table(*works), SLOW, 1, uploads)
    return SimBackend(Spec(blocks=9), durations, build=with_uploads(build) if uploads == "lane" else build)


def two_steps(uploads: str) -> list[tuple[float, float]]:
    machine = backend(uploads, Work(2.0, 0.0), Work(2.0, 0.0))
    for id in (0, 1):
        machine.launch(step(id, part(0, 1, start=8)))
    return times(completions(machine))


def test_what_a_rank_uploads():
    """20 bytes a token, 4 for each block that holds them or what was before; the rank with most tells."""
    slices = Columns.of([part(0, 3, start=16), part(1, 1, start=15), part(2, 1, start=0, rank=1)])
    assert input_bytes(slices, 16) == 20 * 4 + 4 * (2 + 1)


def test_before_the_kernels_the_device_waits():
    assert two_steps("before") == [(0.0, 3.5), (3.5, 7.0)]


def test_in_a_lane_the_next_steps_inputs_travel_while_one_computes():
    """Until 1.5 and until 3, when the first step still runs."""
    assert two_steps("lane") == [(1.5, 3.5), (3.5, 5.5)]


def test_inputs_wait_for_blocks_that_are_swapped_in():
    """A copy of 3 s, inputs that come 1.5 s later: in one lane they are there at 4.5."""
    machine = backend("lane", Work(2.0, 0.0), Work(2.0, 0.0))
    machine.launch(Step(0, 0, 0.0, (), (Copy(1, 1, 0, (0,), (1,), COPY_IN),)))
    machine.launch(step(1, part(0, 1, start=8)))
    assert [(done.lane, done.started) for done in completions(machine)] == [(COPY_IN, 0.0), (MAIN, 4.5)]


@pytest.mark.parametrize(
    "work, later",
    [
        (2.0, 3.5),
        (Kernels(2.0, 1.0, 0.5), Kernels(3.5, 1.0, 0.5)),
        (Work(2.0, 1.0, True, 0.25), Work(3.5, 1.0, True, 0.25)),
    ],
)
def test_whatever_tells_of_the_work(work, later):
    one = step(0, part(0, 1, start=8))
    for uploads, told in (("before", later), ("lane", Upload(1.5, work))):
        assert Uploaded(Table(work), SLOW, 1, uploads).of(one).lanes[MAIN].stages == (told,)


def test_copies_bring_their_own_data():
    one = step(0, part(0, 1, start=8), copies=(Copy(1, 1, 0, (0,), (1,), COPY_IN),))
    assert Uploaded(Table(2.0), SLOW, 1, "before").of(one).lanes[COPY_IN].stages == (3.0,)
