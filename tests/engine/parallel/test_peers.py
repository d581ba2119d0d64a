"""Ranks in processes of their own exchange by one another's memory: on a CPU, where files stand for it."""

import pytest

pytest.importorskip("triton")

from tests.engine.parallel.peer_ranks import digests
from tests.kernels.paged import interpreted

pytestmark = [interpreted(), pytest.mark.timeout(120)]


def test_ranks_that_are_now_ahead_and_now_behind(tmp_path):
    first, second = digests(["cpu"] * 2, tmp_path, rounds=3, interpret=True, limit=100)
    assert first == second
