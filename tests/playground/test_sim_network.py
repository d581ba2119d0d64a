"""Transfers that hold a port at either end, by hand. One unit is a second; lower case sends, upper case receives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy.core import Environment

from playground.sim.network import Network, max_min


def run(*transfers: tuple[float, str, float]) -> list[float]:
    """When each (begin, ports, work) is done."""
    environment, ends = Environment(), {}
    network = Network(environment)

    def begin(index: int, ports: str, work: float) -> None:
        network.submit(f"{index}", tuple(ports), work, lambda _, end: ends.__setitem__(index, end))

    for index, (at, ports, work) in enumerate(transfers):
        timer = environment.timeout(at)
        timer.callbacks.append(lambda _, index=index, ports=ports, work=work: begin(index, ports, work))
    environment.run()
    return [ends[index] for index in range(len(transfers))]


def test_incast_is_bound_by_the_receiver():
    """Three senders with ports of their own, one receiver: a third of the rate each. Without its port: 2 s each."""
    assert run((0, "aX", 2.0), (0, "bX", 2.0), (0, "cX", 2.0)) == [6.0, 6.0, 6.0]
    assert run((0, "aX", 2.0), (0, "bY", 2.0), (0, "cZ", 2.0)) == [2.0, 2.0, 2.0]


def test_both_directions_of_a_link_are_free_of_each_other():
    assert run((0, "aB", 2.0), (0, "bA", 2.0)) == [2.0, 2.0]


def test_what_one_cannot_use_at_its_other_end_others_get():
    """a sends to X, where three arrive: a third. The other two thirds of a's port go to its second transfer, to Y."""
    assert max_min([("a", "X"), ("b", "X"), ("c", "X"), ("a", "Y")]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_rates_change_when_somebody_comes_or_goes():
    """1 s alone (1 of 3 done), then halves: the second has its 1 s at 3, the first its last 1 s alone until 4."""
    assert run((0, "aX", 3.0), (1, "bX", 1.0)) == [4.0, 3.0]


def test_who_shares_a_port_with_one_who_shares_a_port():
    """Halves of X and of b's port until one ends at 2, which leaves the second alone with its last 1 s; or the second
    ends first, at 1: the first has 0.5 left, the third 1.5, and neither shares any more."""
    assert run((0, "aX", 1.0), (0, "bX", 2.0), (0, "bY", 1.0)) == [2.0, 3.0, 2.0]
    assert run((0, "aX", 1.0), (0, "bX", 0.5), (0, "bY", 2.0)) == [1.5, 1.0, 2.5]


def test_a_lane_keeps_its_order():
    environment, ends = Environment(), []
    network = Network(environment)
    for work in (3.0, 1.0):
        network.submit("lane", ("a", "X"), work, lambda start, end: ends.append((start, end)))
    environment.run()
    assert ends == [(0.0, 3.0), (3.0, 4.0)]


PORTS = st.tuples(st.sampled_from("abc"), st.sampled_from("XYZ"))


@given(st.lists(PORTS, min_size=1, max_size=7))
def test_ports_are_never_overfull_and_everybody_is_held_by_a_full_one(transfers):
    """What max-min fairness means: who wants more finds a full port on which nobody has more than he."""
    shares = max_min(transfers)
    for ports, share in zip(transfers, shares, strict=True):
        held = False
        for port in ports:
            through = [other for used, other in zip(transfers, shares, strict=True) if port in used]
            assert sum(through) <= 1 + 1e-9
            held |= sum(through) > 1 - 1e-9 and share >= max(through) - 1e-9
        assert held


@given(st.lists(st.tuples(st.floats(0, 3), PORTS.map("".join), st.floats(0, 3)), min_size=1, max_size=6))
def test_no_port_carries_more_than_its_rate(transfers):
    ends = run(*transfers)
    for port in "abcXYZ":
        used = [(at, work, end) for (at, ports, work), end in zip(transfers, ends, strict=True) if port in ports]
        if used:
            assert sum(work for _, work, _ in used) <= max(e for *_, e in used) - min(at for at, *_ in used) + 1e-6
