"""Real tensors on a simulated clock: another backend says when steps are done, the engine says what they bring.

For parity tests: with it the same policy meets pipelines, replicas and run-ahead with real tokens on one CPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf

from engine.backend import make_pools
from engine.models.decoder import Decoder
from engine.runner import Outcome, Runner, in_order
from playground.backend import Backend
from playground.core import Done, Step


class CostedBackend:
    """A simulated backend whose tokens, and ends, come from a model.

    Every rank has KV of its own, all share the weights; pipeline stages exist in time only. Steps are computed in the
    order of their launch, at the latest when one's completion is due. Where output lengths are given both agree on
    ends; where an end token decides, the model's word counts, and `Step.ends` carries it to the simulation.
    """

    def __init__(self, model: Decoder, inner: Backend) -> None:
        length = min(inner.spec.max_length, model.shape.max_length)
        # A repetition would take tokens for granted that only computing brings.
        self.spec = replace(inner.spec, max_length=length, repeats=False)
        self._inner = inner
        self._runners = [
            Runner(model, {rank: make_pools(model, self.spec) for rank in ranks}) for ranks in self.spec.groups
        ]
        self._launched: deque[Step] = deque()
        self._outcomes: dict[tuple[int, str], Outcome] = {}

    def now(self) -> float:
        """Simulated seconds."""
        return self._inner.now()

    def launch(self, step: Step) -> None:
        """Start a step in the simulation and queue it for computing."""
        self._launched.append(step)
        self._inner.launch(step)

    def wait(self, until: float = inf) -> Done | None:
        """The simulation's next completion, with the model's tokens in it."""
        done = self._inner.wait(until)
        if done is None:
            return None
        while (done.step, done.lane) not in self._outcomes:
            self._compute(self._launched.popleft())
        outcome = self._outcomes.pop((done.step, done.lane))
        return replace(done, **outcome._asdict())

    def close(self) -> None:
        """Close the simulation."""
        self._inner.close()

    def _compute(self, step: Step) -> None:
        runner = self._runners[step.group]
        runner.begin(step)
        for lane in in_order(step.lanes):
            self._outcomes[step.id, lane] = runner.prepare(step, lane)()
        runner.end(step)
