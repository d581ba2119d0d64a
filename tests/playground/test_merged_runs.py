"""Long answers and few events, merged against stepped: who comes, goes, waits and moves in the middle of stretches.

`test_laws` has every composition on short answers; here stretches are long, and policies are of another package.
"""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest

from playground.core import Request, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import Trace, expand, read
from playground.workload.source import ClosedLoop, OpenLoop
from policies.admission import MaxLength
from policies.budget import ChunkedPrefill, Orca, TokenThrottling
from policies.composed import Composed
from policies.route import LeastOutstanding


@dataclass(frozen=True)
class Holding:
    """A route that answers None while every rank has `most` requests, but not for longer than `patience` seconds."""

    most: int
    patience: float = 99.0

    def __call__(self, request, view):
        best = min(view.loads, key=lambda load: (load.running + load.waiting, -load.blocks_free, load.rank))
        late = view.now > request.arrival + self.patience
        return best.rank if late or best.running + best.waiting < self.most else None


class Restless:
    """Around another policy: now and then it gives up a sequence, sends one on, or turns one away.

    Each after so many tokens, which is foreseen in `steady`.
    """

    def __init__(self, inner: Composed, after: int) -> None:
        self.place, self.run_ahead, self._inner, self._after = inner.place, inner.run_ahead, inner, after
        self._seen: set[int] = set()
        self._sent: set[int] = set()

    def fill(self, draft) -> None:
        for sequence in list(draft.running):
            if sequence.id not in self._seen and sequence.returned == sequence.promised >= self._after:
                self._seen.add(sequence.id)
                draft.preempt(sequence)
        for sequence in list(draft.waiting):
            if sequence.id in self._seen - self._sent and sequence.id % 3 and draft.spec.ranks > 1:
                self._sent.add(sequence.id)
                draft.send(sequence, (draft.rank + 1) % draft.spec.ranks)
            elif sequence.id % 5 == 4:
                draft.reject(sequence, "unwanted")
        self._inner.fill(draft)

    def steady(self, draft) -> int:
        left = [self._after - one.promised for one in draft.running if one.id not in self._seen]
        return max(0, min(self._inner.steady(draft), min(left, default=99) - 2))


def parts(seed: int) -> tuple[dict[str, Any], Linear, Any, Any]:
    """All that a run depends on; of source and policy, what makes a fresh one."""
    rng = Random(seed)
    spec = dict(
        blocks=rng.choice([20, 60, 300]),
        block_size=rng.choice([2, 4]),
        max_seqs=rng.choice([64, 4, 2]),
        stages=rng.choice([1, 2, 3]),
        ranks=rng.choice([1, 1, 2, 3]),
        lockstep=rng.random() < 0.3,
        forwards_tokens=True,
    )
    most = spec["blocks"] * spec["block_size"]
    requests = []
    for id in range(10):
        prompt, answer = rng.randint(1, 8), rng.randint(1, min(60, most - 10))
        requests.append(Request(id, 0.0, prompt, answer, rng.randint(1, answer)))
    cost = Linear(
        rng.uniform(0.01, 0.02), 0.0005 * rng.random(), 0.0001 * rng.random(), host_base=rng.choice([0.0, 0.004, 0.015])
    )
    times = sorted(rng.uniform(0, 2) for _ in requests)
    clients, think, closed = rng.randint(2, 6), rng.uniform(0, 0.3), rng.random() < 0.4
    aborts = [(times[id] + rng.uniform(0, 1), id) for id in rng.sample(range(10), 4)] if rng.random() < 0.7 else []
    budget = rng.choice([ChunkedPrefill(8), ChunkedPrefill(64), Orca(3), TokenThrottling(16, 2, 2)])
    route = rng.choice([partial(Holding, 1), partial(Holding, 2, 0.1), partial(Holding, 3, 0.1), LeastOutstanding])
    after = rng.choice([0, 0, rng.randint(3, 20)])

    def source():
        if closed:
            return ClosedLoop(requests, clients, think)
        arriving = [Request(one.id, at, *shape(one)) for one, at in zip(requests, times, strict=True)]
        return OpenLoop(arriving, aborts)

    def policy():
        inner = Composed(budget, route=route(), **({"admission": MaxLength()} if isinstance(budget, Orca) else {}))
        return Restless(inner, after) if after else inner

    return spec, cost, source, policy


def shape(request: Request) -> tuple[int, int, int | None]:
    return request.prompt_length, request.max_tokens, request.output_length


@pytest.mark.parametrize("seed", range(60))
def test_merged_runs_are_what_stepping_gives(seed, tmp_path):
    made, cost, source, policy = parts(seed)
    tables = []
    for repeats in (False, True):
        spec = Spec(**made, repeats=repeats)
        folder = tmp_path / str(repeats)
        with Trace(folder) as trace:
            serve(source(), Scheduler(spec, policy()), SimBackend(spec, Modelled(cost, spec.stages)), trace)
        found = [table.to_pylist() for table in expand(folder, spec.block_size)]
        others = [read(folder, name).drop_columns(extra).to_pylist() for name, extra in OTHERS.items()]
        tables.append(found + [sorted(rows, key=str) for rows in others])
    assert tables[0] == tables[1]


OTHERS: dict[str, list[str]] = {"requests": [], "events": ["look"], "arrivals": ["look"]}
