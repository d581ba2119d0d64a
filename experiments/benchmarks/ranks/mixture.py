"""DP attention with expert parallelism: the tokens and logprobs of one GPU, and how many tokens a second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from engine.parallel.layout import Layout
from experiments.benchmarks.gpu.engine.crowd import in_flight
from experiments.benchmarks.gpu.engine.serving import Served, policy, served
from experiments.benchmarks.ranks.bench import ONE, Bench
from playground.backend import Backend
from playground.core import Request, Sampling, Step

MODEL = "qwen3-30b-a3b"
EXCHANGES = ("all_gather", "padded_all_to_all")
BOUND = 5e-2
"""Of the relative difference of bf16 logprobs."""
LIKELIEST = 8


def check_mixture(bench: Bench) -> None:
    """Exactly with few layers in float32; with more in bf16, which is also timed."""
    sizes = bench.sizes
    _check_exact(bench, bench.model(MODEL, num_hidden_layers=sizes.exact_layers))
    _check_fast(bench, bench.model(MODEL, num_hidden_layers=sizes.layers))


def _layout(exchange: str) -> Layout:
    return Layout(replicas=2, lockstep=True, ep=2, exchange=exchange)


def _check_exact(bench: Bench, path: str) -> None:
    with bench.crew(path, ONE, "float32") as backend:
        expected = Told.of(_uneven_run(bench, backend))

    def check(exchange: str) -> None:
        with bench.crew(path, _layout(exchange), "float32") as backend:
            _check(bench, f"DPA2 + EP2, {exchange}, float32", expected, _uneven_run(bench, backend), exact=True)

    for exchange in EXCHANGES:  # one that fails does not take the other along
        bench.report.attempt(f"dpa float32 {exchange}", partial(check, exchange))


def _check_fast(bench: Bench, path: str) -> None:
    crowd = bench.sizes.mixed_crowd
    with bench.crew(path, ONE) as backend:
        expected = Told.of(_uneven_run(bench, backend))
        alone = _throughput(bench, backend, crowd, "one GPU")

    def check(exchange: str) -> None:
        name = f"DPA2 + EP2, {exchange}"
        with bench.crew(path, _layout(exchange)) as backend:
            _check(bench, f"{name}, bf16", expected, _uneven_run(bench, backend), exact=False)
            found = _throughput(bench, backend, 2 * crowd, name)
        bench.report.row(f"mixture, {name}, times one GPU", found / alone, "times", part="dpa")

    for exchange in EXCHANGES:
        bench.report.attempt(f"dpa bf16 {exchange}", partial(check, exchange))


def _uneven_run(bench: Bench, backend: Backend) -> Served:
    return served(backend, uneven(bench.sizes.prompt), policy(2048, 1))


def uneven(longest: int) -> list[Request]:
    """By turns to two ranks, of which the second has short prompts, and is soon idle."""
    telling = Sampling(ignore_eos=True, logprobs=LIKELIEST)
    shapes = [(longest, 24), (3, 4), (longest // 2, 20), (longest // 4 + 1, 6), (7, 24), (1, 2)]
    return [Request(id, 0.0, prompt, output, output, sampling=telling) for id, (prompt, output) in enumerate(shapes)]


class Told(NamedTuple):
    """Tokens of each request, and the log-probabilities of the likeliest ones for each token."""

    tokens: Mapping[int, Sequence[int]]
    logprobs: Mapping[int, Sequence[Mapping[int, float]]]

    @classmethod
    def of(cls, run: Served) -> Told:
        logprobs: dict[int, list[Mapping[int, float]]] = {}
        for _, done in run.recorder.done:
            for id, told in done.logprobs.items():
                logprobs.setdefault(id, []).extend(dict(one.top) for one in told)
        return cls(run.tokens, logprobs)


def _check(bench: Bench, name: str, expected: Told, run: Served, exact: bool) -> None:
    found = Told.of(run)
    firsts = {id: _first_difference(found.tokens[id], tokens) for id, tokens in expected.tokens.items()}
    differing = {id: at for id, at in firsts.items() if at is not None}
    idle = sum(bool(step.dummies) for step, _ in run.recorder.done)
    loads = [_loads(step) for step, _ in run.recorder.done]
    skewed = sum(max(load) > 2 * min(load) > 0 for load in loads)
    error = _logprob_error(expected, found, firsts)
    good = idle > 0 and skewed > 0 and error < BOUND and not (exact and differing)
    bench.report.check(
        name, good, requests=len(firsts), differing=differing, logprob_error=error, bound=BOUND, steps=len(loads),
        steps_with_an_idle_replica=idle, steps_with_uneven_prefill=skewed,
    )  # fmt: skip


def _loads(step: Step) -> tuple[int, int]:
    """Tokens of either rank."""
    parts = step.slices
    first, second = (sum(part.length for part in parts if part.rank == rank) for rank in (0, 1))
    return first, second


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if list(one) == list(other):
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _logprob_error(expected: Told, found: Told, firsts: Mapping[int, int | None]) -> float:
    """||found - expected|| / ||expected||, of tokens that both told, as long as what came before was the same."""
    squares = norm = 0.0
    for id, first in firsts.items():
        known = expected.logprobs[id][: None if first is None else first + 1]
        for theirs, ours in zip(known, found.logprobs[id], strict=False):
            for token in theirs.keys() & ours.keys():
                squares += (theirs[token] - ours[token]) ** 2
                norm += theirs[token] ** 2
    return math.sqrt(squares / norm) if norm else math.inf


def _throughput(bench: Bench, backend: Backend, size: int, name: str) -> float:
    """Tokens of answers a second."""
    sizes = bench.sizes
    run = in_flight(backend, sizes.request, size, sizes.output, policy(2048, 1), sizes.window / 2)
    bench.report.row(
        f"mixture, {sizes.layers} layers, {sizes.prompt} + {sizes.output} x {size}, {name}", run.tokens_per_second,
        "tokens/s", tpot_ms=run.tpot * 1e3, ended=run.ended, part="dpa",
    )  # fmt: skip
    return run.tokens_per_second
