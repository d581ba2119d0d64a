"""The shapes of a published comparison: vLLM 0.12, Llama-3.1-8B in FP8 on an H200, so many requests in flight.

The figures are NVIDIA's (AIConfigurator's `silicon_sample.csv`, source "gap analysis"): mean TPOT at a concurrency,
and for some rows mean TTFT. Not told is how many prompts were sent and whether they repeated. By Little's law a row of
the same series (4000 + 100, 32 in flight, TTFT 184 ms, TPOT 11.67 ms) needs 1.4 PFLOP/s for its prompts, 72 % of the
datasheet's FP8 peak, beside its decodes: its prompts were hardly all computed at a steady concurrency. Hence three
measurements: the decode step alone, and closed loops in which every prompt is new, and in which all were seen before.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from experiments.benchmarks.gpu.engine.crowd import Steady, in_flight
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE, alike, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject
from playground.core import Request
from playground.rank import hash_tokens

MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class Shape:
    """So many requests in flight, and the mean TPOT that vLLM had with FP8."""

    size: int
    prompt: int
    output: int
    vllm_fp8_ms: float
    seconds: float
    """Of the window that is measured."""
    budgets: tuple[int, ...]
    """Tokens a step."""

    @property
    def name(self) -> str:
        return f"{self.size} in flight ({self.prompt} + {self.output})"


SHAPES = (
    Shape(112, 1000, 100, 11.25, 5.0, (512, 2048, 8192)),
    Shape(96, 4000, 500, 17.11, 10.0, (512, 2048)),
)


def time_flight(report: Report, subject: Subject) -> None:
    """Not with the subject: its memory is needed."""
    subject.release()
    found = report.facts[MODEL] = dict[str, object]()
    llama = Subject(MODEL, found)
    for shape in SHAPES:
        report.attempt(f"{shape.name}, decode step", partial(time_alone, report, llama, shape))
        report.attempt(f"{shape.name}, seen before", partial(time_seen, report, llama, shape))
        for tokens in shape.budgets:
            report.attempt(f"{shape.name}, {tokens} a step", partial(time_computed, report, llama, shape, tokens))
    llama.release()


def time_alone(report: Report, subject: Subject, shape: Shape) -> None:
    """Decode steps of the full batch, at contexts about the mean of the closed loop's."""
    context = shape.prompt + shape.output // 2
    # The first answers must not end before the last prompt is computed.
    steps = 48 + shape.size * context // 8192
    run = served(subject.backend, alike(shape.size, context - steps // 2, steps, seed=3), policy(8192, 2))
    full = [done for _, done in run.decodes(shape.size)]
    measured = statistics.median(later.finished - earlier.finished for earlier, later in pairwise(full))
    limit = subject.limit(shape.size, context)
    report.row(
        f"{MODEL}: decode step {shape.size} x {context}", measured * 1e3, "ms", limit * 1e3, of_limit=limit / measured,
        steps=len(full), vllm_fp8_ms=shape.vllm_fp8_ms,
    )  # fmt: skip


def time_computed(report: Report, subject: Subject, shape: Shape, tokens: int) -> None:
    """Every prompt is new."""

    def make(id: int, output: int) -> Request:
        return Request(id, 0.0, shape.prompt, output, output)

    found = in_flight(subject.backend, make, shape.size, shape.output, policy(tokens, 2), shape.seconds)
    work = subject.prefill_limit(1, shape.prompt) + shape.output * _decode_limit(subject, shape) / shape.size
    _row(report, subject, shape, f"{tokens} a step", found, with_prompts=shape.size * work / shape.output)


def time_seen(report: Report, subject: Subject, shape: Shape) -> None:
    """As many prompts as requests in flight, again and again, with the prefix cache: a block of each is computed."""
    rng = np.random.default_rng(5)
    drawn = rng.integers(3, subject.model.shape.vocabulary, (shape.size, shape.prompt)).tolist()
    known = [(prompt, hash_tokens(prompt, SIZE)) for prompt in map(tuple, drawn)]

    def make(id: int, output: int) -> Request:
        prompt, hashes = known[id % shape.size]
        return Request(id, 0.0, shape.prompt, output, output, prompt=prompt, hashes=hashes)

    found = in_flight(subject.backend, make, shape.size, shape.output, policy(2048, 2), shape.seconds, True)
    _row(report, subject, shape, "prompts seen before", found, with_prompts=_decode_limit(subject, shape))


def _decode_limit(subject: Subject, shape: Shape) -> float:
    return subject.limit(shape.size, shape.prompt + shape.output / 2)


def _row(report: Report, subject: Subject, shape: Shape, way: str, found: Steady, with_prompts: float) -> None:
    """`with_prompts`: the least TPOT with the work of the prompts, at the ceilings, in seconds."""
    early, late = found.halves
    report.row(
        f"{MODEL}: TPOT {shape.name}, {way}", found.tpot * 1e3, "ms", _decode_limit(subject, shape) * 1e3,
        limit_with_prompts_ms=with_prompts * 1e3, vllm_fp8_ms=shape.vllm_fp8_ms,
        output_tokens_per_s=found.tokens_per_second, requests_per_s=found.ended / found.seconds,
        ttft_ms=statistics.mean(found.waits) * 1e3 if found.waits else 0.0, first_half_ms=early * 1e3,
        second_half_ms=late * 1e3, steps=found.steps,
        computed_of_prompt=found.computed_of_prompt,
    )  # fmt: skip
