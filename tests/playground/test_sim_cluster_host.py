"""Whose planning delays whom: one host a group, worked out by hand. One unit is a second."""

import pytest

from playground.core import Request, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from tests.playground.fakes import Log
from tests.playground.test_sim import completions, rows, step, times


def test_replicas_plan_at_the_same_time():
    backend = SimBackend(Spec(blocks=9, ranks=3), rows((2.0,), (2.0,), (2.0,), host=0.5))
    for group in range(3):
        backend.launch(step(group, group=group))
    dones = completions(backend)
    assert [(done.launched, done.host) for done in dones] == [(0.5, 0.5)] * 3
    assert times(dones) == [(0.5, 2.5)] * 3


def test_one_replica_plans_one_step_after_another():
    """Its second step is planned by 1.0 and waits for the first until 2.5; the other replica's is not held up."""
    backend = SimBackend(Spec(blocks=9, ranks=2), rows((2.0,), (2.0,), (2.0,), host=0.5))
    for id, group in enumerate((0, 0, 1)):
        backend.launch(step(id, group=group))
    assert backend.now() == 0.0
    dones = sorted(completions(backend), key=lambda done: done.step)
    assert [done.launched for done in dones] == [0.5, 1.0, 0.5]
    assert times(dones) == [(0.5, 2.5), (2.5, 4.5), (0.5, 2.5)]


def test_a_replica_that_was_idle_plans_from_now_on():
    backend = SimBackend(Spec(blocks=9, ranks=2), rows((1.0,), (1.0,), host=0.5))
    backend.launch(step(0, group=1))
    assert backend.wait(7.0) is not None and backend.wait(7.0) is None
    backend.launch(step(1, group=1))
    assert completions(backend)[0].launched == 7.5


@pytest.mark.parametrize("replicas, stages, run_ahead, ends", [(1, 1, 1, 10.0), (2, 1, 1, 10.0), (2, 1, 2, 8.5)])
def test_run_ahead_hides_the_host_of_every_replica(replicas, stages, run_ahead, ends):
    """Four steps of 2 s, each planned in 0.5 s: 4 x 2.5, or 0.5 + 4 x 2; however many replicas do the same."""
    spec = Spec(blocks=9, block_size=4, ranks=replicas, stages=stages, forwards_tokens=True)
    scheduler = Scheduler(spec, Composed(ChunkedPrefill(), overlap=Overlap(run_ahead)))
    log = Log(scheduler)
    requests = [Request(id, 0.0, 4, 4) for id in range(replicas)]
    serve(OpenLoop(requests), scheduler, SimBackend(spec, Modelled(Linear(2.0, host_base=0.5), stages)), log)
    assert max(done.finished for done in log.dones[: 4 * replicas]) == ends


def test_a_pipeline_has_one_host_for_all_its_stages():
    """Stages take 1 s, planning 1.25: every step waits for its planning, and none for a stage."""
    spec = Spec(blocks=9, block_size=4, stages=2, max_tokens=4)
    backend = SimBackend(spec, rows((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), host=1.25))
    for id in range(3):
        backend.launch(step(id))
    assert [done.launched for done in completions(backend)] == [1.25, 2.5, 3.75]
