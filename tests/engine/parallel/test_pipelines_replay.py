"""Pipelines of real processes, whatever fills their steps: the simulator that replays them decides the same."""

from contextlib import closing
from math import inf

import pytest

from playground.check.parity import replay
from playground.check.recording import load
from policies.budget import ChunkedPrefill, PrefillFirst, TokenThrottling, Unified
from policies.composed import Composed
from policies.victims import Largest
from tests.engine.parallel.crews import fake
from tests.parity.runs import fresh, record, requests

BUDGETS = {
    "vllm_v1": Unified(64),
    "chunked_prefill": ChunkedPrefill(48),
    "vllm_v0": PrefillFirst(64),
    "token_throttling": TokenThrottling(96, 8, 4),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_pipeline_replays(budget, tmp_path, monkeypatch):
    """Requests come while steps are in flight: the loop looks when word of a completion is still on its way."""
    # Steps as short as these are heard of late on a busy machine; that nothing else is wrong is what replaying shows.
    monkeypatch.setattr("playground.check.parity.LAG_SHARE", inf)

    def policy():
        return Composed(BUDGETS[budget], victims=Largest())

    with closing(fake(sizes={"stages": 3}, delay=0.002)) as backend:
        record(tmp_path, policy(), backend, requests(40, 0.01))
    recording = load(tmp_path)
    assert replay(recording, fresh(recording.spec, policy())).requests == 40
