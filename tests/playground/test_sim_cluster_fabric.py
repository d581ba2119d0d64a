"""Contention on ports against times worked out by hand. One unit is a second."""

from dataclasses import replace

import pytest

from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Spec
from playground.sim.backend import SimBackend
from playground.sim.cluster import Cluster
from playground.sim.contention import TURNS
from playground.sim.durations import LaneTimes, StepTimes, Work
from playground.sim.fabric import Fabric
from playground.sim.links import Link, Links
from tests.playground.test_sim import completions, part, step, times

LINKS = Links("x", Link(1.0, latency=0.25), devices_per_host=4, start=0.25)
SHARED = Links("x", Link(1.0, latency=0.25, shared_by=4), devices_per_host=4, start=0.25)


class Table:
    """Lanes by step."""

    def __init__(self, *rows) -> None:
        self._rows = rows

    def of(self, step) -> StepTimes:
        row = self._rows[step.id]
        lanes = row if isinstance(row, dict) else {MAIN: row}
        return StepTimes(0.0, lanes)


def backend(cluster, *rows, lockstep=False, law=TURNS) -> SimBackend:
    spec = Spec(blocks=9, stages=cluster.stages, ranks=cluster.replicas, lockstep=lockstep)
    return SimBackend(spec, Table(*rows), build=Fabric(cluster, law))


def launch(backend, *groups):
    for id, group in enumerate(groups):
        backend.launch(step(id, group=group))
    return completions(backend)


PIPE = LaneTimes((Work(1.0, 0.0), Work(1.0, 0.0)), 4.0)


def test_replicas_that_send_through_their_own_ports_do_not_feel_one_another():
    dones = launch(backend(Cluster(LINKS, stages=2, replicas=2), PIPE, PIPE), 0, 1)
    assert [done.stages for done in dones] == [((0.0, 1.0), (5.5, 6.5))] * 2


def test_replicas_that_send_through_one_port_share_it():
    """Both send 4 s from 1 on at half speed: 8 s, then half a second of latency in which the port is free."""
    dones = launch(backend(Cluster(SHARED, stages=2, replicas=2), PIPE, PIPE), 0, 1)
    assert [done.stages for done in dones] == [((0.0, 1.0), (9.5, 10.5))] * 2


def test_a_transfer_that_comes_later_slows_one_that_is_under_way():
    """1-3 alone (2 of 4 done), then halves: done at 7; the other has 2 left, alone until 9. Latency comes after."""
    late = LaneTimes((Work(3.0, 0.0), Work(1.0, 0.0)), 4.0)
    early = LaneTimes((Work(1.0, 0.0), Work(1.0, 0.0)), 4.0)
    dones = launch(backend(Cluster(SHARED, stages=2, replicas=2), early, late), 0, 1)
    assert [done.stages[1][0] for done in dones] == [7.5, 9.5]


def test_latency_does_not_keep_the_next_transfer_waiting():
    one = LaneTimes((Work(1.0, 0.0), Work(0.5, 0.0)), 1.0)
    far = replace(LINKS, start=10.0)
    dones = launch(backend(Cluster(far, stages=2), one, one), 0, 0)
    assert [done.stages[1] for done in dones] == [(12.25, 12.75), (13.25, 13.75)]


def test_collectives_come_after_the_kernels_and_hold_the_stage():
    row = LaneTimes((Work(2.0, 3.0),))
    assert times(launch(backend(Cluster(LINKS, tp=2), row, row), 0, 0)) == [(0.0, 5.0), (5.0, 10.0)]


def test_collectives_of_two_replicas_behind_one_switch_share_it():
    """Kernels until 2 and 3. The first has the port until 3 (1 of 3 sent), then half: 7. The other has 1 left: 8."""
    cluster = Cluster(SHARED, tp=2, replicas=2)
    dones = launch(backend(cluster, LaneTimes((Work(2.0, 3.0),)), LaneTimes((Work(3.0, 3.0),))), 0, 1)
    assert [done.finished for done in dones] == [7.0, 8.0]


def test_one_lanes_collectives_run_under_the_other_lanes_kernels():
    """Both lanes at half speed until 4 (2 done each); then a sends 4-7 and b has the device alone: 4-6, sends 6-..."""
    row = {"a": LaneTimes((Work(2.0, 3.0),)), "b": LaneTimes((Work(4.0, 1.0),))}
    machine = backend(Cluster(LINKS, tp=2), row)
    machine.launch(step(0, part(0, lane="a"), part(1, lane="b")))
    # At 6 a has sent 2 of 3; both at half speed: each has 1 left, both done at 8.
    assert [(done.lane, done.finished) for done in completions(machine)] == [("a", 8.0), ("b", 8.0)]


@pytest.mark.parametrize(
    "links, host_shares, lane, copied, sent",
    [
        (SHARED, True, COPY_OUT, 3.0, 6.0),
        (SHARED, True, COPY_IN, 3.0, 6.0),  # the next stage receives through the switch that the copy comes in by
        (LINKS, True, COPY_OUT, 3.0, 6.0),
        (LINKS, True, COPY_IN, 2.0, 5.0),  # full duplex: the first stage only sends
        (SHARED, False, COPY_OUT, 2.0, 5.0),
    ],
)
def test_a_copy_to_the_host_shares_the_port_of_sends(links, host_shares, lane, copied, sent):
    """A copy of 2 s from 0 on, a send of 4 s from 1 on. At half the rate each the copy ends at 3; of the send 1 s is
    done then, so that it ends at 6 and arrives half a second later. Alone they end at 2 and 5."""
    copy = {lane: LaneTimes((2.0,))}
    machine = backend(Cluster(replace(links, host_shares=host_shares), stages=2), {MAIN: PIPE, **copy})
    machine.launch(step(0, part(0), copies=(Copy(1, 1, 0, (1,), (0,), lane),)))
    dones = {done.lane: done for done in completions(machine)}
    assert dones[lane].finished == copied
    assert dones[MAIN].stages[1][0] == sent + 0.5


def test_what_arrives_shares_the_port_with_the_receivers_collectives():
    """Two stages of two devices, each with a port of its own. The first step's collectives on the second stage begin at
    1 + 0.5 (its send took nothing) and need 6 s; the second step's send of 4 s begins at 2 and arrives through a port
    that those receive through, too: halves from 2 on. At 10 it has sent its 4 s; of the 6 s, 0.5 + 4 are done and the
    last 1.5 go alone until 11.5. Counted where they leave, neither would feel the other: 6 and 7.5."""
    first = LaneTimes((Work(1.0, 0.0), Work(0.0, 6.0)), 0.0)
    second = LaneTimes((Work(1.0, 0.0), Work(1.0, 0.0)), 4.0)
    dones = launch(backend(Cluster(LINKS, tp=2, stages=2), first, second), 0, 0)
    assert dones[0].finished == 11.5
    assert dones[1].stages[1][0] == 11.5  # it arrived at 10.5 and waits for the stage


@pytest.mark.parametrize("work, ends", [(Work(4.0, 3.0, True, 0.5), 4.5), (Work(3.0, 4.0, True, 0.5), 4.5)])
def test_what_overlaps_takes_as_long_as_the_longer_and_the_tail(work, ends):
    assert work.alone == ends
    assert times(launch(backend(Cluster(LINKS, tp=2), LaneTimes((work,))), 0)) == [(0.0, ends)]


@pytest.mark.parametrize("work, ends", [(Work(4.0, 3.0), 7.0), (Work(4.0, 3.0, tail=1.0), 8.0)])
def test_what_does_not_overlap_takes_the_sum(work, ends):
    assert work.alone == ends
    assert times(launch(backend(Cluster(LINKS, tp=2), LaneTimes((work,))), 0)) == [(0.0, ends)]
