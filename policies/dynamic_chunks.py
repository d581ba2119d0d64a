"""Chunks whose size follows how far a prompt is, or how much time the decodes beside it have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import Protocol

from playground.draft import Draft
from playground.sequence import Sequence
from policies.composed import FOREVER, Admissions, Chunks, Decodes, Phase


@dataclass(frozen=True, slots=True)
class ProgressChunks:
    """Chunked prefill whose chunks shrink as a prompt goes on: its attention takes the longer, the more is behind it.

    All decodes first. A prompt of which p tokens are done may fill its step up to size(p) tokens: `levels` sizes,
    equally spaced from `high` down to `low` and rounded to multiples of 32, one for every `span` / `levels` tokens,
    and `low` from `span` on. What the prefix cache has of a new prompt counts as nothing done.
    Source: Sarathi-Serve 13f16cf, `enable_dynamic_chunking_schedule` (`low_chunk_size`, `high_chunk_size`,
    `chunk_schedule_max_tokens`, `chunk_schedule_stages`), which sets no defaults, so those here are ours, and refuses
    prompts beyond `span`.
    """

    low: int = 512
    high: int = 2048
    span: int = 8192
    levels: int = 4

    def __post_init__(self) -> None:
        for name in ("low", "span", "levels"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"policy.budget.{name}={value} must be at least 1")
        if self.high < self.low:
            raise ValueError(f"policy.budget.high={self.high} must be at least policy.budget.low={self.low}")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes()
        for prompt in draft.partial:
            yield Chunks(self.size(prompt.launched) - draft.tokens, of=(prompt,))
        yield Admissions(self.size(0) - draft.tokens)

    def size(self, done: int) -> int:
        """Tokens of a step in which a prompt goes on of which so many are done."""
        level = min(done // ceil(self.span / self.levels), self.levels - 1)
        steps = self.levels - 1
        exact = int(self.high - level * (self.high - self.low) / steps) if steps else self.low
        unit = min(32, self.low)
        return round(exact / unit) * unit

    def steady(self, draft: Draft) -> int:
        return FOREVER


class StepTime(Protocol):
    """Seconds that a step will take: tokens of prompts, decodes, and the tokens of KV that either look back on."""

    def __call__(self, prefill: int, decodes: int, prefill_context: int, decode_context: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear model of a step's time: `base` seconds, and seconds a token for all others.

    `prefill` and `decode`: for each token of that kind; the `_context`s: for each token of KV that such tokens look at.
    """

    base: float
    prefill: float
    decode: float
    prefill_context: float
    decode_context: float

    def __call__(self, prefill: int, decodes: int, prefill_context: int, decode_context: int) -> float:
        context = self.prefill_context * prefill_context + self.decode_context * decode_context
        return self.base + self.prefill * prefill + self.decode * decodes + context


@dataclass(frozen=True, slots=True)
class TwoLinear:
    """Two linear models: `small` up to `knee` tokens, where a step's time is memory's, `large` beyond: arithmetic's.

    Source: Niyama, `_predict_batch_time` of Sarathi-Serve 72339db, whose coefficients of all tokens are added to those
    of each kind. They were fitted to one model on one device (an 8B on an A100, by their size); fit your own.
    """

    small: Linear = Linear(0.014936, 8.130431e-05, 9.516994e-05, 7.554773e-07, 1.111258e-07)
    large: Linear = Linear(0.005004, 9.582093e-05, -1.424943e-05, 2.727223e-06, 1.663409e-07)
    knee: int = 512

    def __call__(self, prefill: int, decodes: int, prefill_context: int, decode_context: int) -> float:
        model = self.small if prefill + decodes <= self.knee else self.large
        return model(prefill, decodes, prefill_context, decode_context)


SIZES = (128, *range(256, 2049, 256), 2552)
TIGHT_SIZES = (128, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class DeadlineChunks:
    """As many prompt tokens as the decodes beside them have time for.

    All decodes first. Their slack is what is left until the first of their tokens of this step is due: the n-th of an
    answer `slo.tpot` n seconds after the first came or its own deadline (arrival + `slo.ttft`), whichever was later.
    The step gets the largest of `sizes` whose time by `time`, times `margin`, fits into the slack, else the
    smallest; of `tight_sizes` while a 32nd of the free KV is less than `tight` tokens. Requests without objectives
    have all the time there is. Admitted prompts go on by deadline of their first token; meant with `order=edf`.
    Source: Niyama (ASPLOS'26), `deadline_scheduler.py` of Sarathi-Serve 72339db (sizes, margin 1.2, tight 1000).
    Where its binary search may miss it, for the two models do not meet, the largest is taken. Not taken over: putting
    off prompts that will miss their deadline anyway, and tiers with a deadline for the whole answer.
    """

    time: StepTime = TwoLinear()
    sizes: tuple[int, ...] = SIZES
    tight_sizes: tuple[int, ...] = TIGHT_SIZES
    margin: float = 1.2
    tight: int = 1000

    def __post_init__(self) -> None:
        for name in ("sizes", "tight_sizes"):
            sizes = tuple(getattr(self, name))  # a list where it was read from a file
            object.__setattr__(self, name, sizes)
            if not sizes or sizes[0] < 1 or any(one >= next for one, next in pairwise(sizes)):
                raise ValueError(f"policy.budget.{name}={list(sizes)} must be growing numbers of at least 1")
        if not self.margin > 0:
            raise ValueError(f"policy.budget.margin={self.margin} must be above 0; 1 trusts the predictor")
        if self.tight < 0:
            raise ValueError(f"policy.budget.tight={self.tight} must be 0 (never) or more tokens")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes()
        if not (draft.waiting or draft.partial):
            return
        prompts = sorted(draft.partial, key=_first_deadline)
        decodes = draft.tokens
        most = self.prefill(draft, decodes, prompts[0].launched if prompts else 0)
        yield Chunks(most, of=tuple(prompts))
        yield Admissions(most + decodes - draft.tokens)

    def prefill(self, draft: Draft, decodes: int, context: int) -> int:
        """Prompt tokens of a step with so many decodes, if the first prompt looks back on `context` tokens."""
        sizes = self._sizes(draft)
        slack, behind = _slack(draft)
        if slack == inf:
            return max(sizes[-1] - decodes, 0)
        for size in reversed(sizes):
            most = max(size - decodes, 0)
            if self.margin * self.time(most, decodes, context, behind) <= slack:
                return most
        return most

    def _sizes(self, draft: Draft) -> tuple[int, ...]:
        return self.tight_sizes if draft.blocks_free * draft.spec.block_size // 32 < self.tight else self.sizes

    def steady(self, draft: Draft) -> int:
        return FOREVER  # the clock is read for prompts only, and none can come in while nothing but decodes tick


def _slack(draft: Draft) -> tuple[float, int]:
    """Seconds until the first of the tokens that decodes were just asked for is due (`inf`: none is), and their KV."""
    soonest, behind = inf, 0
    for decode in draft.decoding:
        behind += decode.launched
        request = decode.request
        slo = request.slo
        tpot = slo.tpot
        if tpot < inf:
            due, came = request.arrival + slo.ttft, decode.first_token
            if came is not None and (due == inf or due < came):
                due = came
            due += tpot * decode.promised
            if due < soonest:
                soonest = due
    return soonest - draft.now, behind


def _first_deadline(sequence: Sequence) -> tuple[float, float, int]:
    request = sequence.request
    return request.arrival + request.slo.ttft, request.arrival, sequence.id
