from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.check.examination import examine
from playground.check.properties import named
from playground.core import Request, Spec
from playground.policy import ClusterView, Load
from playground.scheduler import Scheduler
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.prefix_route import CacheAware, Preble
from policies.route import LeastKv, LeastOutstanding, PowerOfTwo, RoundRobin, SessionAffinity


def view(*loads, **more):
    """(waiting, running) of each rank."""
    ranks = [Load(rank, waiting, running, 0, 100, 100) for rank, (waiting, running) in enumerate(loads)]
    return ClusterView(1.0, 1.0, ranks, Random(0), lambda rank: 0, **more)


REQUEST = Request(0, 0.0, 10, 10).view()


def test_round_robin_takes_turns_whatever_the_load():
    route = RoundRobin()
    busy_first = view((9, 9), (0, 0), (0, 0))
    assert [route(REQUEST, busy_first) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_two_round_robins_do_not_share_their_turn():
    one, other = RoundRobin(), RoundRobin()
    assert (one(REQUEST, view((0, 0), (0, 0))), other(REQUEST, view((0, 0), (0, 0)))) == (0, 0)


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        (((3, 0), (0, 2), (1, 2)), 1),  # 3, 2, 3
        (((0, 9), (5, 3), (0, 9)), 1),  # 9, 8, 9: waiting and running count alike
        (((1, 1), (2, 0), (0, 2)), 0),  # all equal, none chosen before: the first
    ],
)
def test_least_outstanding_joins_the_shortest_queue(loads, rank):
    assert LeastOutstanding()(REQUEST, view(*loads)) == rank


def test_a_composed_policy_places_where_its_route_says():
    assert Composed(ChunkedPrefill(), route=LeastOutstanding()).place(REQUEST, view((1, 0), (0, 0))) == 1


def test_overlap_is_how_many_steps_are_outstanding_per_stage():
    assert Composed(ChunkedPrefill()).run_ahead(Spec(100)) == 1
    assert Composed(ChunkedPrefill(), overlap=Overlap(2)).run_ahead(Spec(100)) == 2
    with pytest.raises(ValueError, match=r"policy.overlap.run_ahead=0 must be at least 1"):
        Overlap(0)


# --- ties


def test_among_equals_the_one_chosen_longest_ago_goes():
    """Ranks 0 and 2 are equal at every second choice only: an order that began one further on each time would give all
    of those to rank 0."""
    route = LeastOutstanding()
    equal, alone = view((0, 0), (9, 0), (0, 0)), view((9, 0), (0, 0), (9, 0))
    assert [route(REQUEST, seen) for seen in (equal, alone) * 4] == [0, 1, 2, 1, 0, 1, 2, 1]


WINDOWS, BURST = 20, 5


def shares(route, **request):
    """How often each of two ranks is chosen: 20 reports that say both are idle, five requests after each."""
    chosen = Counter()
    for window in range(WINDOWS):
        loads = view((0, 0), (0, 0)).loads
        for place in range(BURST):
            now = window + (place + 1) / 10
            seen = ClusterView(now, float(window), loads, Random(window * BURST + place), lambda rank: 0, fresh=False)
            chosen[route(Request(window * BURST + place, now, 10, 10, **request).view(), seen)] += 1
    return chosen[0], chosen[1]


def test_the_first_among_equals_gets_six_of_ten():
    """vLLM PR #47420: within a report's time requests alternate, 0 1 0 1 0, and the next report begins with 0 again."""
    assert shares(LeastOutstanding(waiting=4.0, own=True, ties="first")) == (60, 40)


UNBIASED = [
    LeastOutstanding(),
    LeastOutstanding(own=True),
    LeastOutstanding(waiting=4.0, own=True),
    LeastKv(),
    LeastKv(own=True),
    SessionAffinity(),
    SessionAffinity(own=True),
    CacheAware(),
    CacheAware(own=False),
    Preble(),
    RoundRobin(),
]


@pytest.mark.parametrize("route", UNBIASED, ids=repr)
def test_no_tie_break_prefers_a_rank(route):
    assert shares(route) == (50, 50)


@pytest.mark.parametrize("own", [False, True])
def test_a_drawn_tie_break_prefers_no_rank_but_for_chance(own):
    first, _ = shares(PowerOfTwo(own=own))
    assert 35 <= first <= 65  # three standard deviations of 100 throws of a coin


# --- old loads


def burst(route, **options):
    """Requests on each of three ranks when 12 come at once, long before the next report."""
    scheduler = Scheduler(Spec(blocks=9999, ranks=3), Composed(ChunkedPrefill(), route=route), **options)
    for id in range(12):
        scheduler.arrive(Request(id, 0.25, 10, 10, session=f"{id}"), 0.25)
    return [len(rank.waiting) for rank in scheduler.ranks]


OLD = {"report_interval": 1.0}


@pytest.mark.parametrize("make", [LeastOutstanding, LeastKv], ids=lambda make: make.__name__)
def test_who_sees_its_own_placements_spreads_a_burst_that_old_loads_hide(make):
    assert burst(make(), report_interval=0.0) == [4, 4, 4]
    assert burst(make(own=True), **OLD) == [4, 4, 4]


PURE = [LeastOutstanding, LeastKv, PowerOfTwo, SessionAffinity]


@pytest.mark.parametrize("make", PURE, ids=lambda make: make.__name__)
def test_the_kit_finds_stale_dispatch_in_the_rule_alone_and_none_with_own(make):
    def failed(**options):
        def policy():
            return Composed(ChunkedPrefill(), route=make(**options))

        report = examine(policy, 2, properties=named(["stale_loads"]), patience=0)
        return [verdict.property.name for verdict in report.failed]

    assert (failed(), failed(own=True)) == (["stale_loads"], [])


def later(route, **options):
    """Where six more go when a report taken at 1.0 said that rank 0 has four requests, and the others none."""
    scheduler = Scheduler(Spec(blocks=9999, ranks=3), Composed(ChunkedPrefill(), route=route), **options)
    place, scheduler.policy = scheduler.policy, Composed(ChunkedPrefill(), route=lambda request, view: 0)
    for id in range(4):
        scheduler.arrive(Request(id, 0.5, 100, 10), 0.5)
    scheduler.policy = place
    for id in range(4, 10):
        scheduler.arrive(Request(id, 1.5, 100, 10), 1.5)
    return [len(rank.waiting) for rank in scheduler.ranks]


@pytest.mark.parametrize(
    "route",
    [
        lambda: LeastOutstanding(own=True),
        lambda: LeastKv(own=True),
        lambda: SessionAffinity(own=True),
        lambda: CacheAware(balance_abs=0),
    ],
    ids=["requests", "KV", "session", "cache-aware"],
)
def test_every_route_that_looks_at_loads_knows_what_reports_tell_and_when(route):
    """Fresh or reported at 1.0: rank 0 has four, so that the six go to the others, three each. Reported at 2.0 or
    delivered late (at 1.6): all look idle, two each."""
    assert later(route()) == [4, 3, 3]
    assert later(route(), report_interval=1.0) == [4, 3, 3]
    assert later(route(), report_interval=2.0) == [6, 2, 2]
    assert later(route(), report_interval=1.0, report_delay=0.6) == [6, 2, 2]


def test_a_burst_goes_to_the_one_that_looked_least_loaded_whatever_went_there_since():
    """SGLang PR #21699's double dispatch: rank 0 is known to be busy, rank 1 to have one token more than rank 2."""
    for make, spread in ((LeastKv, [0, 0, 6]), (lambda: LeastKv(own=True), [0, 3, 3])):
        route, known = make(), kv((9, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1))
        chosen = Counter(route(REQUEST, known) for _ in range(6))
        assert [chosen[rank] for rank in range(3)] == spread


def test_two_choices_see_old_loads_too():
    """Of three, rank 0 is never the better one where it is known to be busy; where it looks idle it may be."""
    assert later(PowerOfTwo(), report_interval=1.0)[0] == 4
    assert later(PowerOfTwo(), report_interval=2.0)[0] > 4


@pytest.mark.parametrize("route", [RoundRobin, Preble])
def test_who_looks_at_no_loads_does_not_care_about_their_age(route):
    assert later(route(), report_interval=2.0) == later(route(), report_interval=1.0) == later(route())


# --- each rule


LOADS = st.lists(st.integers(0, 12), min_size=2, max_size=5)


@given(LOADS, st.integers(0, 30))
def test_own_placements_fill_ranks_like_water(counts, requests):
    """DPBudget: nobody gets a request above the level of another who could have had it."""
    route, levels = LeastOutstanding(own=True), list(counts)
    for _ in range(requests):
        levels[route(REQUEST, view(*[(0, count) for count in counts], fresh=False))] += 1
    filled = [level for level, count in zip(levels, counts, strict=True) if level > count]
    assert max(filled, default=0) <= min(levels) + 1


def test_the_better_of_the_drawn():
    """With as many choices as ranks the least loaded of all; with one choice, whoever is drawn."""
    loads = view((3, 0), (0, 1), (5, 5))
    assert {PowerOfTwo(choices=3)(REQUEST, loads) for _ in range(20)} == {1}
    assert {PowerOfTwo(choices=1)(REQUEST, loads) for _ in range(50)} == {0, 1, 2}


def test_two_choices_never_take_the_worst_of_three():
    chosen = Counter(PowerOfTwo()(REQUEST, loads) for loads in [view((3, 0), (0, 1), (5, 5))] * 60)
    assert chosen[2] == 0
    assert chosen[1] > chosen[0] > 0  # 2/3 and 1/3


def kv(*ranks):
    """(used blocks of 100, waiting tokens, waiting, running) of each rank, blocks of 16 tokens."""
    loads = [Load(i, w, r, tokens, 100 - used, 100) for i, (used, tokens, w, r) in enumerate(ranks)]
    return ClusterView(1.0, 0.0, loads, Random(0), lambda rank: 0, fresh=False)


def test_least_kv_counts_tokens_held_and_waited_for():
    # 20 blocks are 320 tokens, 10 blocks and 159 waiting are 319.
    assert LeastKv()(REQUEST, kv((20, 0, 0, 1), (10, 159, 1, 9))) == 1
    assert LeastKv()(REQUEST, kv((20, 0, 0, 1), (10, 161, 1, 9))) == 0
    assert LeastKv()(REQUEST, kv((20, 0, 0, 9), (10, 160, 1, 1))) == 1  # 320 both: 9 requests, 2 requests


def test_a_prompt_just_placed_counts_with_its_tokens():
    # 10 tokens each: 0 -> 1 has 5 more tokens, so the second goes there, and the third to the lower of 10 and 15.
    route = LeastKv(own=True)
    assert [route(REQUEST, kv((0, 0, 0, 0), (0, 5, 1, 0))) for _ in range(3)] == [0, 1, 0]


def of_session(session):
    return Request(0, 0.0, 10, 10, session=session).view()


def test_a_session_stays_where_it_began():
    route = SessionAffinity()
    assert route(of_session("a"), view((1, 0), (0, 0))) == 1
    assert route(of_session("a"), view((0, 0), (99, 0))) == 1
    assert route(of_session("b"), view((0, 0), (99, 0))) == 0
    assert [route(REQUEST, view((0, 0), (99, 0))), route(REQUEST, view((99, 0), (0, 0)))] == [0, 1]


def test_a_session_moves_for_good_when_its_replica_is_too_far_ahead():
    route = SessionAffinity(ahead=3)
    assert route(of_session("a"), view((0, 0), (1, 0))) == 0
    assert route(of_session("a"), view((2, 2), (1, 0))) == 0  # 3 more
    assert route(of_session("a"), view((2, 3), (1, 0))) == 1  # 4 more
    assert route(of_session("a"), view((0, 0), (1, 0))) == 1


def test_only_so_many_sessions_are_remembered():
    route = SessionAffinity(sessions=2)
    first, second = view((0, 0), (9, 0)), view((9, 0), (0, 0))
    assert [route(of_session(name), first) for name in "aba"] == [0, 0, 0]
    assert route(of_session("c"), first) == 0  # b was used least recently
    assert [route(of_session(name), second) for name in "ab"] == [0, 1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LeastOutstanding(ties="random"), r"policy.route.ties=random must be turns or first"),
        (lambda: PowerOfTwo(choices=0), r"policy.route.choices=0 must be at least 1"),
        (lambda: SessionAffinity(ahead=-1), r"policy.route.ahead=-1 must be 0 or more requests \(inf"),
        (lambda: SessionAffinity(ahead=float("nan")), r"policy.route.ahead=nan"),
        (lambda: SessionAffinity(sessions=0), r"policy.route.sessions=0"),
        (lambda: CacheAware(cache_threshold=1.1), r"policy.route.cache_threshold=1.1 must lie in \[0, 1\]"),
        (lambda: CacheAware(balance_abs=-1), r"policy.route.balance_abs=-1"),
        (lambda: CacheAware(balance_rel=0.5), r"policy.route.balance_rel=0.5 must be at least 1"),
        (lambda: CacheAware(tree_blocks=0), r"policy.route.tree_blocks=0"),
        (lambda: Preble(window=0), r"policy.route.window=0 must be more than 0 seconds"),
        (lambda: Preble(answer=-1), r"policy.route.answer=-1"),
        (lambda: Preble(skew=0.9), r"policy.route.skew=0.9 must be at least 1"),
        (lambda: Preble(warm_up=-1), r"policy.route.warm_up=-1"),
    ],
)
def test_options_that_cannot_be_say_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()
