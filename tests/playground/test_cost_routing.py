"""Routing to experts: loads by hand, and against chance drawn many times."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from playground.model import Experts
from playground.sim.cost.routing import Loads, inclusion, measured, uniform, zipf

EXPERTS = Experts(64, 4, 100)


class TestShares:
    def test_uniform_is_zipf_without_slope(self):
        assert uniform(EXPERTS) == zipf(EXPERTS, 0.0) == (4 / 64,) * 64

    def test_zipf_by_hand(self):
        # 1, 1/2, 1/3, 1/4 sum to 25/12.
        assert zipf(Experts(4, 1, 100), 1.0) == pytest.approx((12 / 25, 6 / 25, 4 / 25, 3 / 25))

    def test_nobody_is_picked_more_than_once_a_token(self):
        # 6 of 8 would be 1.5 picks: one is certain, the second pick falls on the others in proportion.
        assert inclusion([6, 1, 1], 2) == (1.0, 0.5, 0.5)
        assert inclusion([100, 50, 1, 1], 3) == (1.0, 1.0, 0.5, 0.5)

    @given(st.lists(st.floats(0.01, 100), min_size=4, max_size=40), st.integers(1, 4))
    def test_shares_sum_to_the_picks(self, weights, active):
        shares = inclusion(weights, active)
        assert sum(shares) == pytest.approx(active)
        assert 0 < min(shares) <= max(shares) <= 1

    def test_a_histogram(self):
        assert measured(Experts(4, 2, 100), [3, 1, 2, 2]) == (0.75, 0.25, 0.5, 0.5)
        with pytest.raises(ValueError, match=r"cost\.expert_counts has 3 entries; give one for each of 4 experts"):
            measured(Experts(4, 2, 100), [1, 1, 1])
        with pytest.raises(ValueError, match=r"cost\.expert_counts must be 0 or more, and above 0 for at least 2"):
            measured(Experts(4, 2, 100), [1, 0, 0, 0])


class TestLoads:
    def test_one_rank_by_hand(self):
        # A token meets 4 experts; two tokens 64 (1 - (60/64)^2) = 7.75.
        loads = Loads(uniform(EXPERTS))
        assert loads.of(1) == (4.0, pytest.approx(4.0))
        assert loads.of(2) == (8.0, pytest.approx(64 * (1 - (60 / 64) ** 2)))

    def test_many_tokens_meet_every_expert_and_share_evenly(self):
        assert Loads(uniform(EXPERTS)).of(5000) == (20000.0, pytest.approx(64))
        # 8 ranks: 2500 rows each, sqrt(5000 x 8 x 1/16 x 15/16) = 48.4 about it, and 1.42 of that for the most of 8.
        rows, distinct = Loads(uniform(EXPERTS), 8).of(5000)
        assert rows == pytest.approx(2500 + 1.4236 * 48.41, rel=1e-4)
        assert distinct == pytest.approx(8)

    @pytest.mark.parametrize("ranks", [1, 4, 16])
    @pytest.mark.parametrize("tokens", [1, 4, 32, 512])
    def test_as_chance_has_it(self, ranks, tokens):
        random = np.random.default_rng(0)
        rows, distinct = [], []
        for _ in range(200):
            picks = np.argpartition(random.random((tokens, 64)), 4, axis=1)[:, :4]
            by_rank = np.bincount(picks.ravel(), minlength=64).reshape(ranks, -1)
            rows.append(by_rank.sum(1).max())
            distinct.append((by_rank > 0).sum(1).max())
        load = Loads(uniform(EXPERTS), ranks).of(tokens)
        # Normal is a coarse word for one token that four of sixteen ranks get.
        tolerance = 0.2 if tokens * 4 / ranks < 2 else 0.03
        assert load.rows == pytest.approx(np.mean(rows), rel=tolerance)
        assert load.distinct == pytest.approx(np.mean(distinct), rel=tolerance)

    def test_a_histogram_of_a_rank_that_gets_all(self):
        shares = measured(EXPERTS, [1.0] * 16 + [0.0] * 48)
        assert Loads(shares, 4).of(100) == (400.0, pytest.approx(16))
        # Dealt out one by one, each rank gets four of the sixteen.
        assert Loads(shares, 4, dealt=True).of(10000).rows == pytest.approx(10000, rel=0.02)

    @given(st.integers(1, 20000), st.floats(0, 1.5), st.sampled_from([1, 2, 8, 32]))
    def test_bounds(self, tokens, exponent, ranks):
        load = Loads(zipf(EXPERTS, exponent), ranks, dealt=True).of(tokens)
        assert tokens * 4 / ranks <= load.rows * (1 + 1e-9)
        assert load.rows <= tokens * 4
        assert 0 < load.distinct <= min(64 // ranks, load.rows) * (1 + 1e-9)

    def test_more_tokens_never_take_less(self):
        loads = Loads(zipf(EXPERTS, 0.8), 8, dealt=True)
        rows, distinct = zip(*(loads.of(tokens) for tokens in range(1, 3000)), strict=True)
        assert list(rows) == sorted(rows)
        assert all(later >= sooner - 1e-9 for sooner, later in pairwise(distinct))
