"""Vidur's simulation again, with its tables and its workload, by our scheduler: what differs is semantics.

CodeLlama-34B on two A100 (TP2), Sarathi with chunks of 512, at most 128 sequences, blocks of 16 tokens, watermark 1 %,
1,000 requests. Run it: python -m experiments.peers.vidur
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from playground.core import Done, Request, Spec, Step
from playground.loop import serve
from playground.model import ModelShape
from playground.scheduler import Ended, Event, Group, Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost.model import CostModel
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import rows
from playground.sim.cost.vidur import Vidur
from playground.sim.device import Device
from playground.sim.durations import Durations, LaneTimes, Modelled, StepTimes
from playground.workload.source import OpenLoop
from policies.admission import FullPrompt
from policies.budget import ChunkedPrefill
from policies.composed import Composed

DATA = Path(str(files("experiments.peers").joinpath("data", "vidur")))
A100 = Device("A100-80GB", 312e12, 2.039e12, 85_899_345_920, 300e9, 32e9)
"""Of these figures Vidur's tables need none but the links, and one stage without swapping not even those."""
BLOCKS = 23_552
"""floor((0.9 * 80 GiB - weights) / KV of 4,096 tokens) slots of 4,096 tokens. The run needs a third of them."""
PERCENTILES = (50, 90, 95, 99)
TOLERANCE = 0.01

REMARKS = (
    "A prompt's last chunk of a single token is a prefill to Vidur and a decode to our cost models, which see lengths: "
    "1.1 ms less for one of 10,691 iterations. From there on the clocks differ by a millisecond, so two later arrivals "
    "just miss an iteration that they just made with Vidur.",
    "Counted as Vidur counts it, every iteration holds the same batch and every request has the same times.",
    "Events of equal time come in order of creation with Vidur; an arrival at the end of an iteration is seen by the "
    "next decision here. No arrival of this workload is that exact.",
)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as Vidur logs it: cached keys rounded up to 64, those of decodes averaged before that."""

    decodes: int
    decode_keys: int
    chunks: tuple[tuple[int, int], ...]
    """(keys before it, tokens)"""
    seconds: float

    @property
    def batch(self) -> tuple[Any, ...]:
        return self.decodes, self.decode_keys, self.chunks

    @property
    def shape(self) -> Shape:
        """A shape that Vidur's formula gives these seconds."""
        tokens = self.decodes + sum(tokens for _, tokens in self.chunks)
        keys = self.decodes * self.decode_keys
        rows = self.decodes + len(self.chunks)
        pairs = sum(tokens * history + tokens * (tokens + 1) // 2 for history, tokens in self.chunks)
        read = sum(history + tokens for history, tokens in self.chunks)
        return Shape(tokens, rows, rows, self.decodes, keys, self.decode_keys, pairs, read, self.chunks)


@dataclass(slots=True)
class Replay:
    """A recorder that keeps what is compared."""

    iterations: list[Iteration] = field(default_factory=list)
    ended_requests: list[Ended] = field(default_factory=list)
    prompts: dict[int, int] = field(default_factory=dict)

    def arrived(self, request: Request) -> None:
        self.prompts[request.id] = request.prompt_length

    def looked(self, now: float, commits: int) -> None: ...
    def waits(self) -> None: ...
    def launched(self, step: Step, group: Group) -> None: ...
    def happened(self, event: Event) -> None: ...

    def committed(self, done: Done, step: Step) -> None:
        self.iterations.append(_iteration(step, self.prompts, done.finished - done.started))

    def ended(self, ended: Ended) -> None:
        self.ended_requests.append(ended)

    def latencies(self) -> dict[str, Array]:
        """Seconds by metric, in order of request."""
        ended = sorted(self.ended_requests, key=lambda one: one.request.id)
        return _latencies(
            [one.request.arrival for one in ended],
            [one.sequence.first_token or 0.0 for one in ended],
            [one.finished for one in ended],
            [one.request.output_length or 1 for one in ended],
        )


Array = NDArray[np.float64]


def workload() -> list[Request]:
    return [
        Request(
            int(row["request_id"]),
            float(row["arrived_at"]),
            int(row["num_prefill_tokens"]),
            int(row["num_decode_tokens"]),
            int(row["num_decode_tokens"]),
        )
        for row in rows(DATA / "workload.csv.gz")
    ]


def cost_model() -> Vidur:
    return Vidur(ModelShape.read("codellama-34b"), A100)


def recorded_iterations() -> list[Iteration]:
    return [
        Iteration(
            int(row["decode_bs"]),
            int(row["decode_avg_kv_rounded64"]),
            tuple(_pair(chunk) for chunk in row["prefills_kv64:chunk"].split("|") if chunk),
            float(row["exec_time_s"]),
        )
        for row in rows(DATA / "iterations.csv.gz")
    ]


def recorded_latencies() -> dict[str, Array]:
    names = "arrived_at", "first_token_at", "completed_at", "num_decode_tokens"
    table = [[float(row[name]) for name in names] for row in rows(DATA / "requests.csv.gz")]
    return _latencies(*zip(*table, strict=True))


class AsVidur:
    """Durations that know prompts, so that a last chunk of one token is charged as a prefill."""

    def __init__(self, cost: CostModel, requests: Iterable[Request]) -> None:
        self._cost = cost
        self._prompts = {request.id: request.prompt_length for request in requests}

    def of(self, step: Step) -> StepTimes:
        shape = _iteration(step, self._prompts).shape
        return StepTimes(0.0, {step.lanes[0]: LaneTimes((self._cost.stage(shape, 0).device_time,))})


def replay(requests: Iterable[Request], durations: Durations) -> Replay:
    """Our Sarathi on these requests: no run-ahead, no host time, every iteration by itself."""
    spec = Spec(blocks=BLOCKS, block_size=16, max_seqs=128)
    policy = Composed(ChunkedPrefill(512), admission=FullPrompt(0.01))
    recorder = Replay()
    serve(OpenLoop(requests), Scheduler(spec, policy), SimBackend(spec, durations), recorder)
    return recorder


def worst_formula_error(cost: CostModel) -> float:
    """The largest relative difference between the formula's and Vidur's time of the iterations that Vidur ran."""
    return max(abs(cost.stage(one.shape, 0).device_time / one.seconds - 1) for one in recorded_iterations())


def differing(ours: list[Iteration], theirs: list[Iteration]) -> int:
    """How many iterations do not hold the same batch, one by one."""
    paired = sum(mine.batch != other.batch for mine, other in zip(ours, theirs, strict=False))
    return paired + abs(len(ours) - len(theirs))


def table(ours: dict[str, Array], theirs: dict[str, Array]) -> Iterator[tuple[str, str, float, float]]:
    """(metric, statistic, ours, Vidur's), seconds."""
    for metric in ours:
        yield metric, "mean", float(ours[metric].mean()), float(theirs[metric].mean())
        for percentile in PERCENTILES:
            mine, other = (float(np.percentile(side[metric], percentile)) for side in (ours, theirs))
            yield metric, f"p{percentile}", mine, other


def main() -> int:
    """0 if all percentiles agree within `TOLERANCE`."""
    cost, requests, theirs = cost_model(), workload(), recorded_iterations()
    print(f"iteration times by the formula: within {worst_formula_error(cost):.1e} of Vidur's")
    ours, alike = replay(requests, Modelled(cost)), replay(requests, AsVidur(cost, requests))
    other, exact = differing(ours.iterations, theirs), differing(alike.iterations, theirs)
    print(f"iterations: {len(ours.iterations)} (Vidur: {len(theirs)}); {other} of them hold other batches,")
    print(f"{exact} if a last chunk of one token is charged as a prefill")
    print(f"\n{'':6}{'':>6}{'ours s':>12}{'Vidur s':>12}{'difference':>12}")
    worst = 0.0
    for metric, statistic, mine, its in table(ours.latencies(), recorded_latencies()):
        worst = max(worst, abs(mine / its - 1))
        print(f"{metric:6}{statistic:>6}{mine:12.5f}{its:12.5f}{mine / its - 1:+12.4%}")
    print("\nWhat differs:", *(f"- {remark}" for remark in REMARKS), sep="\n")
    return int(worst > TOLERANCE)


def _iteration(step: Step, prompts: Mapping[int, int], seconds: float = 0.0) -> Iteration:
    """A decode's keys include its own, as with Vidur, which counts a token as processed when it is sampled."""
    chunks = tuple((_up_to_64(part.start), part.length) for part in step.slices if part.start < prompts[part.sequence])
    contexts = [part.start + 1 for part in step.slices if part.start >= prompts[part.sequence]]
    keys = _up_to_64(sum(contexts) // len(contexts)) if contexts else 0
    return Iteration(len(contexts), keys, chunks, seconds)


def _up_to_64(keys: int) -> int:
    return -(-keys // 64) * 64


def _pair(chunk: str) -> tuple[int, int]:
    history, tokens = chunk.split(":")
    return int(history), int(tokens)


def _latencies(*columns: Iterable[float]) -> dict[str, Array]:
    arrived, first, finished, tokens = (np.asarray(column, float) for column in columns)
    return {"TTFT": first - arrived, "TPOT": (finished - first) / (tokens - 1), "E2EL": finished - arrived}


if __name__ == "__main__":
    sys.exit(main())
