"""Laws by which lanes share a device, and what a step asks of it, worked out by hand. One unit is a second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Spec
from playground.sim.backend import SimBackend
from playground.sim.cluster import Cluster
from playground.sim.contention import APART, TURNS, Demand, Demands, Gain, Partition
from playground.sim.cost import Cost, Shape
from playground.sim.durations import Demanding, LaneTimes, StepTimes, Work
from playground.sim.fabric import Fabric
from playground.sim.processor import Kernels
from tests.playground.test_sim import completions, part, step
from tests.playground.test_sim_cluster_system import LINKS

PREFILL, DECODE = Demand("prefill", 0.9, 0.2), Demand("decode", 0.1, 0.8)


def test_what_needs_different_resources_runs_beside_each_other():
    """0.9 + 0.1 of the arithmetic, 0.2 + 0.8 of the bandwidth: there is just enough."""
    assert Demands().speeds([PREFILL, DECODE]) == pytest.approx([1.0, 1.0])


def test_what_needs_the_same_shares_it():
    """Two decodes ask for 1.6 of the bandwidth, two prefills for 1.8 of the arithmetic."""
    assert Demands().speeds([DECODE, DECODE]) == pytest.approx([1 / 1.6] * 2)
    assert Demands().speeds([PREFILL, PREFILL]) == pytest.approx([1 / 1.8] * 2)


def test_lanes_may_cost_one_another_more_than_resources():
    assert Demands(interference=0.25).speeds([PREFILL, DECODE]) == pytest.approx([0.8, 0.8])


def test_a_part_of_the_sms_slows_what_needs_more_of_them():
    """Prefill has 0.6 of the SMs: 0.9 / 0.6 = 1.5 times as long. Decode has 0.4, which is all it takes to saturate the
    bandwidth: at full speed. Together they ask for 0.2 / 1.5 + 0.8 of that: enough."""
    law = Partition(share=0.6, saturation=0.4)
    assert law.speeds([PREFILL, DECODE]) == pytest.approx([0.9 / 1.35, 1.0])
    assert law.speeds([DECODE, PREFILL]) == pytest.approx([1.0, 0.9 / 1.35])


def test_few_sms_cannot_use_all_bandwidth():
    """0.2 of the SMs reach half of the bandwidth: decode takes 0.8 / 0.5 = 1.6 times as long."""
    assert Partition(share=0.8, saturation=0.4).speeds([PREFILL, DECODE])[1] == pytest.approx(1 / 1.6)


def test_partitions_share_one_memory():
    """Each half of the SMs could have all bandwidth; two decodes ask for 1.6 of it."""
    law = Partition(share=0.5, saturation=0.4)
    assert law.speeds([DECODE, Demand("prefill", 0.1, 0.8)]) == pytest.approx([1 / 1.6] * 2)


def test_lanes_that_the_partition_does_not_name_have_equal_parts():
    law = Partition(share=0.5, saturation=1.0)
    assert law.speeds([Demand("a", 1.0, 0.1), Demand("b", 1.0, 0.1)]) == pytest.approx([0.5, 0.5])
    assert law.speeds([PREFILL, Demand("a", 1.0, 0.1), Demand("b", 1.0, 0.1)])[1] == pytest.approx(0.25)


SHARES = st.floats(0.01, 1.0)
LAWS = st.one_of(
    st.builds(Demands, st.floats(0.0, 2.0)),
    st.builds(Partition, st.just("prefill"), st.floats(0.05, 0.95), st.floats(0.05, 1.0)),
)


@given(LAWS, st.lists(st.tuples(SHARES, SHARES), min_size=2, max_size=4))
def test_no_law_lets_a_device_do_more_than_it_can(law, shares):
    """At the speeds it gives, arithmetic and bandwidth in use are at most all there is, and nobody is stopped."""
    names = ("prefill", "decode", "x", "y")
    busy = [Demand(name, *share) for name, share in zip(names, shares, strict=False)]
    speeds = law.speeds(busy)
    assert all(0 < speed <= 1 for speed in speeds)
    for resource in ("compute", "memory"):
        used = sum(getattr(one, resource) * speed for one, speed in zip(busy, speeds, strict=True))
        assert used <= 1 + 1e-9


@pytest.mark.parametrize(
    "law, message",
    [
        (lambda: Gain(1.5), r"backend.contention.gain=1.5 must lie in \[0, 1\]"),
        (lambda: Demands(-1.0), r"backend.contention.interference=-1.0 must be 0 or more"),
        (lambda: Partition(share=1.0), r"backend.contention.share=1.0 must lie between 0 and 1"),
        (lambda: Partition(saturation=0.0), r"backend.contention.saturation=0.0 must lie in \(0, 1\]"),
    ],
)
def test_impossible_laws_name_themselves(law, message):
    with pytest.raises(ValueError, match=message):
        law()


# --- on the clock


class Table:
    def __init__(self, lanes) -> None:
        self._lanes = lanes

    def of(self, step) -> StepTimes:
        return StepTimes(0.0, {lane: LaneTimes((work,)) for lane, work in self._lanes.items()})


def finished(machine) -> dict[str, float]:
    machine.launch(step(0, part(0, lane="prefill"), part(1, lane="decode")))
    return {done.lane: done.finished for done in completions(machine)}


BOTH = {"prefill": Kernels(6.0, 5.4, 1.2), "decode": Kernels(2.0, 0.2, 1.6)}
"""The demands of above, in seconds."""


@pytest.mark.parametrize(
    "law, decode, prefill",
    [
        (TURNS, 4.0, 8.0),
        (APART, 2.0, 6.0),
        (Demands(), 2.0, 6.0),
        (Demands(interference=0.25), 2.5, 6.5),
        (Partition(share=0.6, saturation=0.4), 2.0, 2 + 6 - 2 / 1.5),
    ],
)
def test_prefill_and_decode_beside_each_other(law, decode, prefill):
    """Until decode is done both go at the law's speeds, then prefill goes alone at full speed."""
    times = finished(SimBackend(Spec(blocks=9), Table(BOTH), law))
    assert times == pytest.approx({"decode": decode, "prefill": prefill})
    late = SimBackend(Spec(blocks=9), Table(BOTH), law)
    late.launch(step(0, part(1, lane="decode"), part(0, lane="prefill")))
    assert {done.lane: done.finished for done in completions(late)} == pytest.approx(times)


def test_lanes_of_different_speeds_end_in_the_order_of_their_ends():
    """Prefill has half the work but 1/4 of the speed."""
    work = {"prefill": Kernels(1.0, 1.0, 0.1), "decode": Kernels(2.0, 0.1, 1.0)}
    times = finished(SimBackend(Spec(blocks=9), Table(work), Partition(share=0.25, saturation=0.5)))
    assert times == pytest.approx({"decode": 2.0, "prefill": 2.0 + 0.5})


def test_exchanges_ask_nothing_of_the_device():
    """Prefill computes 6 s beside decode's 2, then sends 3: decode's demands are those of its kernels alone."""
    work = {"prefill": Work(6.0, 3.0, compute=5.4, memory=1.2), "decode": Work(2.0, 0.0, compute=0.2, memory=1.6)}
    fabric = Fabric(Cluster(LINKS, tp=2), Demands())
    assert finished(SimBackend(Spec(blocks=9), Table(work), build=fabric)) == {"decode": 2.0, "prefill": 9.0}


def test_work_that_does_not_say_asks_for_everything():
    work = {"prefill": Work(2.0, 0.0), "decode": Work(2.0, 0.0)}
    fabric = Fabric(Cluster(LINKS, tp=2), Demands())
    assert finished(SimBackend(Spec(blocks=9), Table(work), build=fabric)) == {"decode": 4.0, "prefill": 4.0}


def test_a_cost_model_says_what_a_lane_asks_for():
    """Of the slower rank; launching that is slower than the kernels leaves the device to others."""

    class Fixed:
        def stage(self, shape: Shape, stage: int) -> Cost:
            return Cost(3.0, 1.0, 4.0, 0.5, 5.0) if shape.tokens > 1 else Cost(0.1, 0.1, 0.2, 0.0, 0.0)

        def host(self, shape: Shape) -> float:
            return 0.0

    (work,) = Demanding(Fixed()).of(step(0, part(0, 1), part(1, 7, rank=1))).lanes["main"].stages
    assert work == Kernels(5.5, 3.0, 1.0)
    assert work.shares == pytest.approx((3 / 5.5, 1 / 5.5))
