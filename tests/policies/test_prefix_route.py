"""Routing by prefixes. Blocks have 16 tokens; a prompt is written as its blocks, one letter each."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.core import Request, Spec
from playground.policy import ClusterView, Load
from playground.scheduler import Scheduler
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.prefix_route import CacheAware, Preble, Prefixes


def keys(text):
    """Chained: each names all before it."""
    return tuple(text[: end + 1] for end in range(len(text)))


def ask(route, text, *loads, now=1.0, more=0):
    """Where a prompt goes: so many blocks, and `more` tokens after them; loads are (waiting, running)."""
    ranks = [Load(rank, waiting, running, 0, 100, 100) for rank, (waiting, running) in enumerate(loads)]
    seen = ClusterView(now, now, ranks, Random(0), lambda rank: 0, prefix=lambda: keys(text))
    return route(Request(0, now, len(text) * 16 + more, 10).view(), seen)


IDLE = (0, 0), (0, 0)

# --- what was sent where


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), st.text("ab", max_size=6))
def test_a_match_is_the_longest_common_prefix(sent, asked):
    prefixes = Prefixes(10**6)
    for text in sent:
        prefixes.add(0, keys(text))
    expected = max((end for text in sent for end in range(len(asked) + 1) if text[:end] == asked[:end]), default=0)
    assert prefixes.matched(0, keys(asked)) == expected
    assert prefixes.matched(1, keys(asked)) == 0
    assert prefixes.size(0) == len({text[: end + 1] for text in sent for end in range(len(text))})


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), st.integers(1, 6))
def test_what_is_forgotten_are_leaves(sent, most):
    """Every prefix of what is known is known."""
    prefixes = Prefixes(most)
    for text in sent:
        prefixes.add(0, keys(text))
        assert prefixes.size(0) <= most
        known = list(prefixes._known[0])
        assert all(key[:end] in known for key in known for end in range(1, len(key)))


def test_the_least_recently_used_leaf_goes_first():
    prefixes = Prefixes(4)
    for text in ("ab", "xy", "ab", "ac"):
        prefixes.add(0, keys(text))
    assert [prefixes.matched(0, keys(text)) for text in ("ab", "xy", "ac")] == [2, 1, 2]


# --- SGLang


def test_a_long_match_is_followed_and_a_short_one_is_not():
    """Threshold 0.5, strictly: of 6 blocks more than 3 must match. A miss goes to the smaller tree."""
    route = CacheAware(cache_threshold=0.5, own=False)
    assert ask(route, "aaaa", *IDLE) == 0  # both trees empty
    assert ask(route, "aaaabb", *IDLE) == 0  # 4 of 6
    assert ask(route, "aaaxxx", *IDLE) == 1  # 3 of 6: rank 1's tree is empty, rank 0's has 6 blocks
    assert ask(route, "zz", *IDLE) == 0  # 6 blocks each: in turn
    assert ask(route, "yy", *IDLE) == 1  # 8 and 6


def test_by_default_more_than_three_tenths_are_followed_and_more_than_64_and_half_as_many_again_are_uneven():
    route = CacheAware(own=False)
    assert ask(route, "aaaaaaaaaa", *IDLE) == 0
    assert ask(route, "aaabbbbbbb", *IDLE) == 1  # 3 of 10
    assert ask(route, "aaaaaaaaaa", (64, 0), (0, 0)) == 0
    assert ask(route, "aaaaaaaaaa", (195, 0), (130, 0)) == 0  # 65 more, but just half as many again
    assert ask(route, "aaaaaaaaaa", (196, 0), (130, 0)) == 1


def test_tokens_after_the_last_known_block_count_as_not_matched():
    route = CacheAware(cache_threshold=0.5, own=False)
    assert ask(route, "aa", *IDLE) == 0
    assert ask(route, "aa", *IDLE, more=33) == 1  # 32 of 65
    assert ask(route, "aa", *IDLE, more=31) in (0, 1)
    assert ask(CacheAware(own=False), "", *IDLE, more=5) == 0  # no hashes, no match


@pytest.mark.parametrize(
    "loads, rank",
    [
        (((32, 0), (0, 0)), 0),  # a difference of 32 is not more than 32
        (((30, 3), (0, 0)), 1),
        (((100, 0), (60, 0)), 0),  # 40 more, but not more than twice as many
    ],
)
def test_uneven_loads_overrule_the_match(loads, rank):
    """Uneven: more than 32 and more than twice as many."""
    route = CacheAware(balance_abs=32, balance_rel=2.0)
    assert ask(route, "aaaa", *IDLE) == 0
    assert ask(route, "aaaa", *loads) == rank


def test_a_prompt_sent_elsewhere_for_the_load_is_remembered_there():
    route = CacheAware(own=False)
    ask(route, "aaaa", *IDLE), ask(route, "aaaa", (99, 0), (0, 0))
    assert ask(route, "aaaab", *IDLE) == 0  # both match: in turn
    assert ask(route, "aaaac", *IDLE) == 1


# --- Preble


def test_exploits_when_more_is_known_than_missed():
    """Blocks of 16 tokens. Loads: what was missed, and 45 for each answer."""
    route = Preble()
    assert ask(route, "aaaa", *IDLE) == 0  # 64 + 45 = 109
    assert ask(route, "aaaabbb", *IDLE) == 0  # 64 known, 48 missed: 109 + 48 + 45 = 202
    # 64 known, 64 missed: explored. 202 + 64 against 0 + 128.
    assert ask(route, "aaaacccc", *IDLE) == 1  # 128 + 45 = 173
    # 48 known on both, 80 missed: 202 + 80 against 173 + 80.
    assert ask(route, "aaaddddd", *IDLE) == 1


def test_exploring_counts_what_the_replica_need_not_compute():
    """10 blocks. Rank 0 has 4 of them, 64 tokens: 109 + 96 against rank 1's load + 160."""
    for before, rank in (("x", 0), ("", 1)):  # rank 1's load is 16 + 45 = 61 (205 < 221), or 0 (205 > 160)
        route = Preble()
        ask(route, "aaaa", *IDLE)
        if before:
            assert ask(route, before, *IDLE) == 1
        assert ask(route, "aaaabbbbbb", *IDLE) == rank


def test_loads_are_those_of_a_window():
    route = Preble(window=10.0)
    assert ask(route, "aaaa", *IDLE, now=0.0) == 0
    assert ask(route, "x", *IDLE, now=9.9) == 1  # 109 against 0
    assert ask(route, "y", *IDLE, now=10.0) == 0  # forgotten: 0 against 61
    assert len(route._recent) == 2


def test_exploiting_stops_where_the_load_is_too_uneven():
    """After two requests a rank are known, rank 0 with more than 1.5 times rank 1's load is let alone."""
    route = Preble(warm_up=2)
    assert ask(route, "aaaa", *IDLE) == 0  # 109
    assert ask(route, "xx", *IDLE) == 1  # 77
    assert ask(route, "aaaa", *IDLE) == 0  # + 45 = 154: more than 1.5 * 77, but three requests only
    assert ask(route, "aaaa", *IDLE) == 0  # + 45 = 199
    assert ask(route, "aaaa", *IDLE) == 1  # strained: 199 + 0 against 77 + 64
    assert ask(Preble(skew=float("inf"), warm_up=0), "aaaa", *IDLE) == 0


# --- in a cluster


@pytest.mark.parametrize("route", [CacheAware, Preble])
def test_prompts_that_begin_alike_go_together(route):
    """Two families of prompts come by turns, 8 of 10 blocks shared: each family on one rank."""
    scheduler = Scheduler(Spec(blocks=9999, ranks=2), Composed(ChunkedPrefill(), route=route()))
    for id in range(10):
        hashes = tuple(id % 2 * 1000 + place + (10000 * (id + 1) if place > 7 else 0) for place in range(10))
        scheduler.arrive(Request(id, 0.0, 160, 10, hashes=hashes), 0.0)
    assert [{id % 2 for id in rank.waiting} for rank in scheduler.ranks] == [{0}, {1}]
