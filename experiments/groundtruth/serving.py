"""A serving run replayed: the server as it was started, the load as it was sent, the latencies as they were counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.groundtruth.calibration import Calibration, Unknowns
from experiments.groundtruth.case import Metrics
from experiments.groundtruth.client import ThroughFrontEnd
from experiments.groundtruth.costs import Hardware, cost_model
from experiments.groundtruth.engines import Engine
from experiments.groundtruth.recorder import InMemory
from experiments.groundtruth.static import decodes, floor, prefills
from playground.core import Request, Spec
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.durations import Modelled
from playground.workload.source import OpenLoop, Source

REQUESTS_PER_USER = 10
"""As InferenceMAX's script and AIConfigurator's `genai_perf_runner` send them; both warm up with two more before."""


class Load(Protocol):
    """Who sends what. `least`: the requests whose latencies physics bounds, none where they are too different."""

    def source(self, latency: float) -> Source: ...
    def least(self) -> Request | None: ...


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests that reach the scheduler at their times, whatever happens."""

    requests: tuple[Request, ...]

    def source(self, latency: float) -> Source:
        return OpenLoop(list(self.requests))

    def least(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """`users` clients, each sending its next request when its last one ended; prompts random.

    Lengths are drawn evenly from `shortest` times the nominal ones up to these.
    """

    users: int
    prompt: int
    output: int
    shortest: float = 1.0

    @property
    def mean_output(self) -> float:
        return self.output * (1 + self.shortest) / 2

    def source(self, latency: float) -> ThroughFrontEnd:
        return ThroughFrontEnd(self._requests(), self.users, latency)

    def least(self) -> Request:
        return Request(0, 0.0, self._least(self.prompt), self._least(self.output))

    def _requests(self) -> Iterator[Request]:
        count = self.users * REQUESTS_PER_USER
        rng = np.random.default_rng(0)
        prompts, outputs = (
            rng.integers(self._least(nominal), nominal + 1, count).tolist() for nominal in (self.prompt, self.output)
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            yield Request(number, 0.0, prompt, output, output)

    def _least(self, nominal: int) -> int:
        return int(nominal * self.shortest)


@dataclass(frozen=True, slots=True)
class Serving:
    """A server and its load. `blocks`: KV blocks of one replica where the run recorded them, else what fits."""

    hardware: Hardware
    engine: Engine
    name: str
    """Of the engine and its model: what a calibration is filed under."""
    load: Load
    blocks: int | None = None
    replicas: int = 1
    prefix_cache: bool = True
    front: str = ""
    """Of the front end: those of one name take equally long."""

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        return self.run(cost, calibration.get(self.name, Unknowns())).means()

    def run(self, cost: str, unknowns: Unknowns) -> InMemory:
        """Serve everything; what was seen."""
        spec = self._spec()
        backend = SimBackend(spec, Modelled(cost_model(cost, self.hardware, unknowns)))
        scheduler = Scheduler(spec, self.engine.policy(), seed=0, prefix_cache=self.prefix_cache)
        source = self.load.source(unknowns.latency)
        recorder = InMemory()
        serve(source, scheduler, backend, recorder)
        if recorder.unserved:
            lost = recorder.unserved[0]
            raise ValueError(f"{self.name}: request {lost.request.id} was {lost.outcome}: {lost.why}")
        if isinstance(source, ThroughFrontEnd):
            recorder.waited = source.waited
        return recorder

    def floor(self) -> Metrics:
        if (request := self.load.least()) is None:
            return {}
        return {
            "ttft": floor(self.hardware, prefills(1, request.prompt_length)),
            "tpot": floor(self.hardware, decodes(1, request.prompt_length)),
        }

    def saturated(self, users: int, length: int) -> bool:
        """Whether so many requests at once ask for more KV or seats than there are: then a queue forms."""
        spec = self._spec()
        return users * spec.blocks_for(length) > spec.blocks * spec.ranks or users > spec.max_seqs * spec.ranks

    def _spec(self) -> Spec:
        blocks = self.hardware.kv_blocks() if self.blocks is None else self.blocks
        return Spec(
            blocks=blocks,
            max_seqs=self.engine.max_seqs,
            max_tokens=self.engine.max_tokens,
            ranks=self.replicas,
            forwards_tokens=True,
            repeats=True,
        )
