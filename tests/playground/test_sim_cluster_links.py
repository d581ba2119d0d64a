"""Links, collectives and placement against numbers worked out by hand. One unit is a second, or a byte."""

from dataclasses import replace

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from playground.sim.cluster import Cluster, Port
from playground.sim.collectives import Exchange, Team
from playground.sim.links import Link, Links, Sheet
from tests.playground.test_cost import DEVICE

INSIDE = Link(100.0, latency=1.0)
OUTSIDE = Link(20.0, fraction=0.5, latency=7.0)  # 10 bytes/s
ONE = Links("one", INSIDE, devices_per_host=4, start=3.0)
TWO = replace(ONE, across=OUTSIDE)
PCIE = replace(ONE, direct=False)


def team(ranks, links=TWO, **options) -> Team:
    return Team.of(replace(links, **options), ranks, "parallel.tp=9")


def test_a_ring_moves_nearly_twice_the_data_in_nearly_twice_as_many_hops_as_there_are_ranks():
    assert team(4, all_reduce="ring").all_reduce(800.0) == Exchange(3 + 6 * 1, 2 * 3 / 4 * 800 / 100)


def test_a_ring_over_hosts_goes_through_every_port_at_once_and_pays_each_border():
    """8 devices on 2 hosts: 14 steps, of which 2 cross; 4 ports a host, 10 bytes/s each."""
    assert team(8, all_reduce="ring").all_reduce(800.0) == Exchange(3 + 12 * 1 + 2 * 7, 2 * 7 / 8 * 800 / 40)


def test_a_port_that_a_host_shares_is_all_that_a_ring_has():
    links = replace(TWO, across=replace(OUTSIDE, shared_by=4), all_reduce="ring")
    assert team(8, links).all_reduce(800.0).wire == 2 * 7 / 8 * 800 / 10


def test_devices_behind_one_switch_share_what_leaves_it():
    links = replace(PCIE, within=replace(INSIDE, shared_by=2), all_reduce="ring")
    assert team(4, links).all_reduce(800.0).wire == 2 * 3 / 4 * 800 / 50


def test_a_tree_is_a_chain_in_each_host_and_binary_over_them():
    links = replace(TWO, all_reduce="tree")
    assert team(4, links).all_reduce(92.0) == pytest.approx((3 + 2 * 3, 2 * 92 / (100 * 0.92)))
    assert team(16, links).all_reduce(92.0) == pytest.approx((3 + 2 * (3 + 2 * 7), 2 * 92 / (40 * 0.92)))


def test_one_shot_reads_everybodys_whole_and_two_shot_a_share_twice():
    assert team(4, all_reduce="one_shot").all_reduce(100.0) == Exchange(4.0, 3.0)
    assert team(4, all_reduce="two_shot").all_reduce(100.0) == Exchange(5.0, 1.5)


@pytest.mark.parametrize(
    "size, links, expected",
    [
        (50.0, ONE, Exchange(4.0, 1.5)),  # one-shot 5.5, two-shot 5.75, ring 9.75
        (200.0, ONE, Exchange(5.0, 3.0)),  # one-shot 10, two-shot 8, ring 12
        (200.0, PCIE, Exchange(9.0, 3.0)),  # nobody reads another's memory: ring 12, tree 13.3
    ],
)
def test_auto_takes_the_fastest_that_there_is(size, links, expected):
    assert team(4, links).all_reduce(size) == expected


def test_what_reads_memory_stays_within_a_host():
    assert team(8, all_reduce="one_shot").all_reduce(80.0) == team(8, all_reduce="ring").all_reduce(80.0)


def test_an_all_gather_is_half_a_ring():
    assert team(4).all_gather(800.0) == Exchange(3 + 3, 3 / 4 * 800 / 100)
    assert team(8).all_gather(800.0) == Exchange(3 + 6 + 7, 7 / 8 * 800 / 40)


def test_in_an_all_to_all_everyone_sends_to_everyone_at_once():
    assert team(4).all_to_all(300.0) == pytest.approx(Exchange(4.0, 3.0), rel=1e-5)
    # 700 bytes over 7 others: 300 stay on the host (3 s), 400 leave it (40 s).
    assert team(8).all_to_all(700.0) == pytest.approx(Exchange(3 + 7, 40.0), rel=1e-5)
    shared = replace(TWO, across=replace(OUTSIDE, shared_by=4))
    assert team(8, shared).all_to_all(700.0).wire == 160.0


def test_a_fast_way_between_hosts_leaves_the_one_within_to_wait_for():
    fast = replace(TWO, across=Link(1e9, latency=7.0))
    assert team(8, fast).all_to_all(700.0) == pytest.approx(Exchange(3 + 7, 3.0), rel=1e-5)


def test_parts_of_an_all_to_all_that_fill_buffers_take_longer_to_start():
    start = team(4).all_to_all(0.0).latency
    assert start == pytest.approx(4.0 + 1.3e-6, abs=1e-9)
    assert team(4).all_to_all(3 * 16384.0).latency - start == pytest.approx(4e-6, abs=1e-9)
    assert team(4).all_to_all(3e9).latency - start == pytest.approx(8e-6, abs=1e-9)


# Rows of AIConfigurator's NCCL 2.29 table for H100; the constants come from H200's.
@pytest.mark.parametrize(
    ("ranks", "size", "seconds"),
    [
        (2, 2048, 6.5e-6),
        (4, 16384, 7.5e-6),
        (8, 131072, 9.7e-6),
        (2, 262144, 14.2e-6),
        (8, 2097152, 18.6e-6),
        (4, 8388608, 39.3e-6),
        (8, 33554432, 124.9e-6),
        (2, 134217728, 259.6e-6),
        (8, 536870912, 1490e-6),
    ],
)
def test_all_to_alls_of_nccl_on_h100(ranks, size, seconds):
    links = instantiate(OmegaConf.load("conf/links/dgx_h100.yaml"))
    sent = size * (ranks - 1) / ranks  # the table counts what everyone keeps
    assert Team(links, 1, ranks).all_to_all(sent).time == pytest.approx(seconds, rel=0.26)


def test_alone_there_is_nothing_to_exchange():
    alone = team(1)
    assert alone.all_reduce(9.0) == alone.all_gather(9.0) == alone.all_to_all(9.0) == (0.0, 0.0)


def test_a_devices_sheet_gives_what_the_roofline_always_took():
    device = replace(DEVICE, link_latency=0.25)
    links = Sheet().of(device)
    assert team(4, links).all_reduce(1000.0) == pytest.approx((0.25, 2 * 3 / 4 * 1000 / device.link))


# --- placement


def test_replicas_lie_side_by_side_and_leave_the_rest_of_a_host_free():
    cluster = Cluster(TWO, stages=3, replicas=3)
    assert [cluster.device(replica, stage) for replica in range(3) for stage in range(3)] == [
        0,
        1,
        2,
        4,
        5,
        6,
        8,
        9,
        10,
    ]
    assert not any(cluster.crosses(replica, stage) for replica in range(3) for stage in range(2))


def test_a_pipeline_that_is_larger_than_a_host_crosses_once():
    cluster = Cluster(TWO, tp=2, stages=4, replicas=2)
    assert [cluster.device(1, stage) for stage in range(4)] == [8, 10, 12, 14]
    assert [cluster.crosses(1, stage) for stage in range(3)] == [False, True, False]
    assert cluster.send_ports(1, 1) == (Port("across", 2, 2), Port("across", 3, 0, inward=True))
    assert cluster.send(1, 0, 500.0) == Exchange(3 + 1, 5.0)
    assert cluster.send(1, 1, 500.0) == Exchange(3 + 7, 50.0)


def test_those_behind_one_port_send_in_turns():
    links = replace(TWO, across=replace(OUTSIDE, shared_by=4))
    assert Cluster(links, tp=2, stages=4).send(0, 1, 500.0).wire == 2 * 50.0
    assert Cluster(links, stages=8).send(0, 3, 500.0).wire == 50.0


def test_a_stage_of_a_lockstep_group_lies_together():
    cluster = Cluster(TWO, stages=2, replicas=4, lockstep=True)
    assert [cluster.device(3, stage) for stage in range(2)] == [3, 7]
    assert (cluster.ranks.hosts, cluster.ranks.local, cluster.tensor.ranks) == (1, 4, 1)
    assert Cluster(TWO, tp=2, replicas=4, lockstep=True).ranks.hosts == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 3}, r"parallel.tp=3: 3 devices must divide links.devices_per_host=4"),
        ({"tp": 6}, r"parallel.tp=6: 6 devices must be a multiple of links.devices_per_host=4"),
        ({"tp": 8}, r"parallel.tp=8: 8 devices need more than one host of 4, and links=one has no link between hosts"),
        ({"replicas": 8, "lockstep": True}, r"parallel.tp=1, parallel.replicas=8: 8 devices need more than one host"),
        ({"stages": 5}, r"parallel.stages=5: .* links=one has no link between hosts"),
    ],
)
def test_what_does_not_fit_a_host_says_so(options, message):
    with pytest.raises(ValueError, match=message):
        Cluster(ONE, **options)


def test_replicas_need_no_link_between_one_another():
    assert Cluster(ONE, tp=2, stages=2, replicas=3).device(2, 1) == 10


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Link(0.0), r"links.bandwidth=0.0 must be more than 0"),
        (lambda: Link(1.0, fraction=1.5), r"links.fraction=1.5"),
        (lambda: Link(1.0, latency=-1.0), r"links.latency=-1.0"),
        (lambda: Link(1.0, shared_by=0), r"links.shared_by=0"),
        (lambda: replace(ONE, all_reduce="star"), r"links.all_reduce=star must be one of auto, ring, tree"),
        (lambda: replace(PCIE, all_reduce="one_shot"), r"links.all_reduce=one_shot needs links.direct=true"),
        (lambda: replace(ONE, devices_per_host=0), r"links.devices_per_host=0"),
        (lambda: replace(ONE, start=-1.0), r"links.start=-1.0"),
    ],
)
def test_impossible_links_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
