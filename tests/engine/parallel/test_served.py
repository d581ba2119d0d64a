"""Recorded runs over real ranks: what is in them is as it was meant, and the simulator decides the same again."""

from contextlib import closing
from itertools import pairwise
from math import inf

import pytest

from engine.parallel.launch import spawned
from playground.check.parity import replay
from playground.check.recording import load
from playground.core import COPY_IN, COPY_OUT
from tests.engine.parallel.forked import forked
from tests.engine.parallel.layouts import COUNT, Case, crew, difference, made
from tests.parity.runs import fresh, record


def recorded(layout, case, folder, hire=forked, model="llama"):
    """Served by workers of its own, compared with one rank, and played again."""
    with closing(crew(layout, model, folder, hire)) as workers:
        turn, asked = workers.turn(case)
        record(folder / "run", made(case), turn, asked)
        assert not difference(model, case, workers.served(turn, asked))
    recording = load(folder / "run")
    assert replay(recording, fresh(recording.spec, made(case))).requests == COUNT
    return recording


def test_workers_that_the_driver_starts(tmp_path):
    """As a front door has them. A prompt is cut, and meanwhile there are steps in which nobody samples."""
    recording = recorded("tp2", Case("vllm_v1", "tight"), tmp_path, spawned)
    sampling = [any(part.samples for part in decision.slices) for decision in recording.decisions.values()]
    assert False in sampling and True in sampling


def test_a_step_is_planned_while_one_runs(tmp_path):
    recording = recorded("tp2", Case("vllm_v1", ahead=2), tmp_path)
    finished = {commit.step: commit.finished for commit in recording.commits}
    early = [recording.decisions[after].planned < finished[before] for before, after in pairwise(sorted(finished))]
    assert sum(early) > len(early) / 2


@pytest.mark.parametrize("layout", ["pp2", "pp2_dp2"])
def test_a_pipeline(layout, tmp_path):
    """Steps are on their way through it together: the next one begins before the last one is out."""
    recording = recorded(layout, Case("token_throttling", "tight"), tmp_path)
    group = [one for one in recording.commits if recording.decisions[one.step].group == 0]
    assert any(after.started < before.finished for before, after in pairwise(group))


def test_a_pipeline_runs_ahead(tmp_path):
    """Tokens are inputs before the driver, or the scheduler, has heard of them."""
    recording = recorded("pp3", Case("token_throttling", ahead=2), tmp_path)
    sampled, early = {}, 0
    finished = {commit.step: commit.finished for commit in recording.commits}
    for step, decision in sorted(recording.decisions.items()):
        for part in decision.slices:
            before = sampled.get((part.sequence, part.start))
            early += before is not None and finished[before] > decision.planned
            if part.samples:
                sampled[part.sequence, part.start + part.length] = step
    assert early > len(sampled) / 2


def test_stages_in_lockstep_that_swap(tmp_path, monkeypatch):
    """A stage copies for a step while the one after it has yet to copy for the step before."""
    # Short steps are heard of late on a busy machine; that nothing else is wrong is what replaying shows.
    monkeypatch.setattr("playground.check.parity.LAG_SHARE", inf)
    recording = recorded("dpa2_pp2_ep2", Case("vllm_v0", "swap"), tmp_path, model="qwen3-moe")
    assert {COPY_IN, COPY_OUT} <= {commit.lane for commit in recording.commits}
