"""Runs of Sarathi-Serve's paper in small: CodeLlama-34B on two A100 by Vidur's tables, and what is read off them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from experiments.peers.vidur import A100
from playground.core import Request, Spec
from playground.draft import Draft
from playground.loop import serve
from playground.model import ModelShape
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import CostModel, Shape, Vidur
from playground.sim.durations import Modelled
from playground.workload.lengths import LengthSet
from playground.workload.source import OpenLoop
from policies.admission import FullPrompt, Watermark
from policies.budget import ChunkedPrefill, PrefillFirst
from policies.composed import Admissions, Chunks, Composed, Decodes, Phase

LONGEST = 4096
"""Tokens of a request, and of a step: the tables end there."""
MODEL = ModelShape.read("codellama-34b")
COST = Vidur(MODEL, A100)
ROOMY = Spec(blocks=24_000, max_seqs=128, max_tokens=LONGEST, repeats=True)


@dataclass
class ChunksAlone:
    """Sarathi's ablation `simple_chunking`: a turn of chunks, then a turn of decodes, never both in one step."""

    tokens: int
    chunked: bool = False

    def phases(self, draft: Draft) -> Iterator[Phase]:
        if not self.chunked or not draft.decoding:
            yield Chunks(self.tokens)
            yield Admissions(self.tokens - draft.tokens)
        self.chunked = bool(draft.tokens)
        if not draft.tokens:
            yield Decodes()


def sarathi(budget: int) -> Composed:
    return Composed(ChunkedPrefill(budget), admission=FullPrompt())


def hybrid_only() -> Composed:
    """Prompts whole, decodes beside them: Sarathi with a budget as long as the longest sequence."""
    return sarathi(LONGEST)


def chunks_only(budget: int) -> Composed:
    return Composed(ChunksAlone(budget), admission=FullPrompt())


def vllm() -> Composed:
    return Composed(PrefillFirst(LONGEST), admission=Watermark())


@dataclass
class Log:
    """What every step held and took, and when every request got its tokens."""

    shapes: list[Shape] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stages: list[tuple[tuple[float, float], ...]] = field(default_factory=list)
    tokens: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ordinals of the steps that gave the tokens."""
    arrivals: dict[int, float] = field(default_factory=dict)
    admitted: dict[int, float] = field(default_factory=dict)
    preempted: int = 0

    def arrived(self, request):
        self.arrivals[request.id] = request.arrival

    def looked(self, now, commits): ...
    def waits(self): ...

    def launched(self, step, group):
        for part in step.slices:
            self.admitted.setdefault(part.sequence, step.planned)

    def committed(self, done, step):
        ends = done.ticks or (done.finished,)
        shape, begun = Shape.of(step.slices), done.started
        each = len(done.stages) // done.count
        for number, end in enumerate(ends):
            stages = done.stages[number * each : (number + 1) * each]
            self.stages.append(stages)
            begun = stages[0][0] if stages else begun
            for sequence in done.tokens:
                self.tokens[sequence].append(end)
                self.turns[sequence].append(len(self.shapes))
            self.shapes.append(shape.tick(number) if number else shape)
            self.seconds.append(end - begun)
            begun = end

    def happened(self, event):
        self.preempted += event.kind == "preempt"

    def ended(self, ended):
        assert ended.outcome == "finished", ended.why

    @property
    def between_tokens(self) -> np.ndarray:
        return np.concatenate([np.diff(times) for times in self.tokens.values()])

    @property
    def first_tokens(self) -> np.ndarray:
        return np.array([self.tokens[id][0] - arrival for id, arrival in self.arrivals.items()])

    @property
    def delays(self) -> np.ndarray:
        return np.array([self.admitted[id] - arrival for id, arrival in self.arrivals.items()])

    def longest_prefill_run(self) -> float:
        """Seconds of the longest run of steps without a decode that somebody with a token had to sit out."""
        longest = run = 0.0
        anybody = False
        for shape, seconds in zip(self.shapes, self.seconds, strict=True):
            if shape.decodes:
                longest, run = max(longest, run), 0.0
            elif anybody:
                run += seconds
            anybody = anybody or bool(shape.sampled)
        return longest

    def bubbles(self) -> float:
        """Idle share of the last stage between its first and last work."""
        busy = sorted(stages[-1] for stages in self.stages)
        return 1 - sum(end - start for start, end in busy) / (busy[-1][1] - busy[0][0])

    def variation(self) -> float:
        """Coefficient of variation of what steps take on the first stage."""
        times = [stages[0][1] - stages[0][0] for stages in self.stages]
        return float(np.std(times) / np.mean(times))


def run(policy: Composed, requests: Iterable[Request], cost: CostModel = COST, spec: Spec = ROOMY) -> Log:
    log = Log()
    backend = SimBackend(spec, Modelled(cost, spec.stages))
    serve(OpenLoop(requests), Scheduler(spec, policy), backend, log)
    return log


def requests(count: int, rate: float | None, lengths: str = "sharegpt", seed: int = 1) -> list[Request]:
    """Poisson arrivals (all at once without a rate) with lengths cut to what the tables hold."""
    rng = np.random.default_rng(seed)
    prompts, outputs = LengthSet(lengths).draw(rng, count)
    gaps = np.zeros(count) if rate is None else rng.exponential(1 / rate, count)
    outputs = np.minimum(outputs, 600)
    prompts = np.minimum(prompts, LONGEST - outputs - 8)
    return [
        Request(id, float(arrival), int(prompt), int(output), int(output))
        for id, (arrival, prompt, output) in enumerate(zip(gaps.cumsum(), prompts, outputs, strict=True))
    ]


def holds(
    policy: Composed, rate: float, slo: float, lengths: str = "sharegpt", stages: int = 1, rows: int = 128
) -> bool:
    """Whether the rate is within capacity: P99 time between tokens at most `slo`, median delay at most 2 s."""
    spec = replace(ROOMY, stages=stages)
    cost = COST if stages == 1 else Vidur(MODEL, A100, stages=stages)
    log = run(policy, requests(400, rate, lengths), cost, spec)
    return bool(np.percentile(log.between_tokens, 99) <= slo and np.median(log.delays) <= 2)
