"""Short runs for parity tests: a workload with bursts, a small KV pool, and a trace in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

from playground.backend import Backend
from playground.core import Request, Spec
from playground.loop import serve
from playground.policy import Policy
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import Trace
from playground.workload.source import OpenLoop
from policies.composed import Composed

COST = Linear(0.002, 0.00005, 0.0000001, host_base=0.0002, host_per_sequence=0.00001)


def requests(count: int = 24, spread: float = 0.01, longest: int = 60, seed: int = 0) -> list[Request]:
    """Bursts of short requests; every third shares a prefix of 32 tokens with the others of its kind."""
    rng, arrival, made = Random(seed), 0.0, []
    for id in range(count):
        arrival += rng.expovariate(1 / spread) * (id % 4 == 0)
        prompt, output = rng.randint(33, longest + 33), rng.randint(1, longest // 2)
        own = range(1000 * (id + 1), 1000 * (id + 1) + prompt // 16 - 2)  # nobody else's, at no other depth
        hashes = (1, 2, *own) if id % 3 == 0 else ()
        made.append(Request(id, arrival, prompt, output + rng.randint(0, 9), output, hashes=hashes))
    return made


def record(
    folder: Path, policy: Policy, backend: Backend, workload: list[Request], aborts: Sequence[tuple[float, int]] = ()
) -> Scheduler:
    """Serve the workload and leave a run folder, as the front door does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"spec": asdict(backend.spec)}))
    scheduler = Scheduler(backend.spec, policy, seed=5)
    with Trace(folder) as trace:
        try:
            serve(OpenLoop(workload, aborts), scheduler, backend, trace)
        finally:
            backend.close()
    scheduler.check()
    return scheduler


def simulated(spec: Spec, cost: Linear = COST) -> SimBackend:
    return SimBackend(spec, Modelled(cost, spec.stages))


def fresh(spec: Spec, policy: Composed) -> Scheduler:
    return Scheduler(spec, policy, seed=5)
