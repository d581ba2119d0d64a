"""Fairness to tenants: counters by hand, and the theorem."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground.core import Request
from policies.admission import MaxLength
from policies.budget import ChunkedPrefill, Orca
from policies.composed import Composed
from policies.fairness import Vtc
from tests.policies.scene import Machine, Scene


class Served(Machine):
    """A machine that several tenants use."""

    def __init__(self, order, budget=None, **spec):
        super().__init__(Composed(budget or ChunkedPrefill(), order=order, admission=MaxLength()), **spec)

    def asks(self, tenant, prompt=10, output=5) -> int:
        id, self.requests = self.requests, self.requests + 1
        self.left[id] = output
        self.scheduler.arrive(Request(id, self.clock, prompt, output, tenant=tenant), self.clock)
        return id

    def admitted(self) -> list[int]:
        """Who starts in the next step."""
        before = set(self.scheduler.ranks[0].running)
        self.turn()
        ended = {ended.sequence.id for ended in self.scheduler.ended}
        return [id for id in self.scheduler.ranks[0].running if id not in before | ended]


def test_the_tenant_that_was_given_least_is_next():
    """One seat. Worked out in the comments: prompt 10 and 5 answers cost 10 + 2 x 5 = 20."""
    order = Vtc()
    machine = Served(order, max_seqs=1)
    first, second = machine.asks("a"), machine.asks("a")
    other = machine.asks("b", prompt=30, output=2)
    assert machine.admitted() == [first]  # a 0, b 0: by name
    turns = [next(iter(machine.turn())) for _ in range(4)]
    assert turns == [first] * 4  # ended: a 20, b 0
    assert machine.admitted() == [other]  # prompt 30: b 30, and 2 for each of two answers
    machine.turn()
    assert machine.admitted() == [second]  # a 20, b 34
    machine.asks("b")
    machine.turn()
    assert (order.counter("a"), order.counter("b")) == (30 + 2 * 2, 34)  # two of the five tokens are asked for


def test_equals_within_a_tenant_go_by_arrival_and_nobody_overtakes():
    machine = Served(Vtc(), blocks=4)
    long = machine.asks("a", prompt=60, output=5)  # all 4 blocks
    machine.turn()
    huge, small = machine.asks("a", prompt=60, output=5), machine.asks("a", prompt=1, output=1)
    for _ in range(4):
        assert machine.turn() == {long: 1}
    assert [machine.admitted(), small in machine.scheduler.sequences] == [[huge], True]


def test_being_idle_saves_nothing_up():
    """b comes when a has been given 60: it begins where a is, and takes turns with it from then on."""
    order = Vtc()
    machine = Served(order, max_seqs=1)
    for _ in range(6):
        machine.asks("a", prompt=10, output=1)  # 12 each
    for _ in range(4):
        machine.turn()
    late = [machine.asks("b", prompt=10, output=1) for _ in range(3)]
    started = []
    while machine.scheduler.live:
        started += machine.turn()
    assert order.counter("b") >= 48 + 2 * 12
    assert started == [4, late[0], 5, late[1], late[2]]


def test_who_finds_nobody_waiting_begins_where_the_last_one_was():
    order = Vtc()
    machine = Served(order)
    machine.asks("a", prompt=100, output=1)
    machine.turn()  # a: 102, nothing waits
    machine.asks("b"), machine.asks("a")
    machine.turn()
    assert order.counter("b") == 102 + 10


def test_a_preempted_request_pays_for_its_prompt_once():
    # 10 for the prompt and 2 for its token. b begins at 12, too, and a comes before b while it is not charged again.
    scene, order = Scene(), Vtc()
    running = scene.waits(prompt=10, tenant="a")
    draft = scene.draft()
    assert next(iter(order(draft))) is running
    draft.take(running, 10)
    running.returned = 1
    scene.waits(prompt=10, tenant="b")
    next(iter(order(draft)))
    assert order.counter("a") == 12
    draft.preempt(running)
    other = scene.waits(prompt=10, tenant="a")
    assert [one for one in order(scene.draft()) if draft.take(one, 20)][:2] == [running, other]
    assert order.counter("a") == 12 + 10


@pytest.mark.parametrize("name", ["prompt_weight", "output_weight"])
def test_weights_are_not_negative(name):
    with pytest.raises(ValueError, match=rf"policy.order.{name}=-1.0"):
        Vtc(**{name: -1.0})


# --- the theorem


SIZES = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 40), st.integers(1, 20), st.integers(0, 12))


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.lists(SIZES, min_size=6, max_size=40),
    st.sampled_from([(1.0, 2.0), (1.0, 1.0), (0.0, 1.0)]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([ChunkedPrefill(16), Orca(4)]),
)
def test_backlogged_tenants_are_given_alike(requests, weights, seats, budget):
    """Theorem 4.4: while two tenants have requests waiting, what they were given differs by 2 U at most."""
    machine = Served(Vtc(*weights), budget=budget, blocks=8, block_size=16, max_seqs=seats)
    left = sorted(requests, key=lambda request: request[3])
    tenants, asked = {}, {}
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    most = max(weights[0] * max(prompt for _, prompt, _, _ in requests), weights[1] * 8 * 16)
    for turn in range(2000):
        while left and left[0][3] <= turn:
            tenant, prompt, output, _ = left.pop(0)
            tenants[machine.asks(tenant, prompt, output)] = tenant
            asked[machine.requests - 1] = prompt
        given = service(machine, tenants, asked, weights)
        backlogged = {one.request.tenant for one in machine.scheduler.ranks[0].waiting.values()}
        for pair in combinations("abc", 2):
            if not backlogged.issuperset(pair):
                spans.pop(pair, None)
                continue
            start = spans.setdefault(pair, tuple(given[one] for one in pair))
            one, other = (given[name] - since for name, since in zip(pair, start, strict=True))
            assert abs(one - other) <= 2 * most
        if not machine.turn() and not left:
            break
    assert not machine.scheduler.live


def service(machine, tenants, asked, weights) -> dict[str, float]:
    """What each was given so far, from the sequences themselves."""
    ended = [one.sequence for one in machine.scheduler.ended]
    given = dict.fromkeys("abc", 0.0)
    for sequence in [*machine.scheduler.ranks[0].running.values(), *ended]:
        given[tenants[sequence.id]] += weights[0] * asked[sequence.id] + weights[1] * sequence.returned
    return given
