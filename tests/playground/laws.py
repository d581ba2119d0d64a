"""Scenarios of the tests, served under the eyes of the laws."""

from __future__ import annotations

from playground.check.laws import Laws
from playground.loop import serve
from playground.sim.backend import SimBackend
from playground.sim.durations import Modelled
from tests.playground.strategies import Scenario


def simulate(scenario: Scenario, seed: int = 0, wrap=lambda part: part) -> Laws:
    """Serve it on the simulated backend under the eyes of the laws."""
    laws = serve_under(lambda scheduler: Laws(scenario.spec, scheduler), scenario, seed, wrap)
    laws.finish(scenario.requests)
    return laws


def serve_under(watch, scenario: Scenario, seed: int = 0, wrap=lambda part: part):
    """Serve it on the simulated backend, backend and policy wrapped, and give back the recorder that `watch` makes."""
    backend = wrap(SimBackend(scenario.spec, Modelled(scenario.cost, scenario.spec.stages)))
    policy = wrap(scenario.composition.policy())
    scheduler = scenario.scheduler(policy, seed)
    recorder = watch(scheduler)
    serve(scenario.source(), scheduler, backend, recorder)
    return recorder
