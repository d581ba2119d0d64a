"""Serving those whose readers wait, not those who have more than they can read: the experience of streamed answers.

A reader expects the first token `ttft` seconds after asking and `rate` tokens a second from then on, or what the
request's own objectives say (`slo.ttft`, 1 / `slo.tpot`). Experience is 1 - delay / whole: the area between the tokens
expected and those that were there to read, over the area below the expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from playground.core import RequestView
from playground.draft import Draft
from playground.sequence import Sequence, State
from policies.composed import Admissions, Chunks, Decodes, Phase, Preemptions


@dataclass(frozen=True, slots=True)
class Reader:
    """When somebody wants to read tokens: none before `start` (seconds since the run began), then `rate` a second."""

    start: float
    rate: float

    def expects(self, time: float) -> float:
        """Tokens read by then, had they all been there."""
        return max(0.0, self.rate * (time - self.start))

    def gain(self, has: float, serving: float, speed: float, end: float) -> float:
        """Experience won until `end` if tokens come from `serving` on at `speed`, rather than none.

        `has`: tokens delivered. Readers who fall behind catch up at once: what was there to read at t is the lesser of
        what is expected and what was delivered. The gain is ∫ min(expected - has, speed (t - serving)), where both are
        above 0, over ∫ expected until `end`.
        """
        hungry = self.start + has / self.rate  # from here on there is nothing left to read
        begin = max(hungry, serving)
        whole = self.rate * max(0.0, end - self.start) ** 2 / 2
        if begin >= end or not whole:
            return 0.0
        corners = [begin, end]
        if speed != self.rate:
            crossing = (speed * serving - self.rate * hungry) / (speed - self.rate)
            if begin < crossing < end:
                corners.insert(1, crossing)
        heights = [min(self.rate * (t - hungry), speed * (t - serving)) for t in corners]
        area = sum(
            (b - a) * (x + y) / 2 for a, b, x, y in zip(corners, corners[1:], heights, heights[1:], strict=False)
        )
        return area / whole


@dataclass(frozen=True, slots=True)
class QoeKnapsack:
    """The requests that win most experience for their KV, greedily, as far as memory and the readers' pace allow.

    In every step each running request and the first `window` waiting ones are valued: experience won in the next
    `horizon` seconds if served, over its tokens of KV. The best fill the pool, but for `reserve` of it, and at most as
    many rows as decode at `rate` (a step takes `step` + `per_decode` seconds a row). Those ahead of their readers win
    nothing: they pause, and lose their KV (as `victims.how` says) to a better one, the least valuable first, each
    at most `preemptions` times, and only if that makes room. What is left of the rows serves them nevertheless.
    `tokens`: budget of prompts and decodes in a step; `prefill`: seconds a token of a prompt. The step's constants are
    those of `policies.slo`. Looks at the clock: quiet stretches are not merged.
    Source: Andes, arXiv 2404.16283v2 (2024): definition of QoE, greedy packing and preemption cap from its abstract and
    summaries; its search over batch sizes is the one that keeps the pace here. Defaults of ttft, rate, horizon: ours.
    """

    ttft: float = 1.0
    rate: float = 5.0
    horizon: float = 10.0
    preemptions: int = 1
    tokens: int = 2048
    window: int = 64
    reserve: float = 0.05
    step: float = 0.005
    per_decode: float = 1.1e-4
    prefill: float = 2.7e-5

    def __post_init__(self) -> None:
        for name in ("rate", "horizon"):
            if not 0 < (value := getattr(self, name)) < inf:
                raise ValueError(f"policy.budget.{name}={value} must be above 0")
        for name in ("ttft", "step", "per_decode", "prefill"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise ValueError(f"policy.budget.{name}={value} must be 0 or more seconds")
        for name in ("tokens", "window"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"policy.budget.{name}={value} must be at least 1")
        if self.preemptions < 0:
            raise ValueError(f"policy.budget.preemptions={self.preemptions} must be 0 (never) or more")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"policy.budget.reserve={self.reserve} must lie in [0, 1)")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        rows = self.rows(draft)
        ranked = self.ranked(draft, rows)
        chosen = self._packed(draft, ranked, rows)
        picked = {sequence.id for sequence in chosen}
        paused = [sequence for sequence in ranked if sequence.state is State.RUNNING and sequence.id not in picked]
        starters = [sequence for sequence in chosen if sequence.state is not State.RUNNING]
        victims = self._victims(draft, starters, paused)
        lost = {sequence.id for sequence in victims}
        yield Preemptions(tuple(victims))
        going = [s for s in (*chosen, *paused) if s.state is State.RUNNING and s.id not in lost][:rows]
        ready = {sequence.id for sequence in draft.decoding}
        yield Decodes(of=tuple(sequence for sequence in going if sequence.id in ready))
        yield Chunks(self.tokens - draft.tokens, of=tuple(sequence for sequence in going if not sequence.decoding))
        yield Admissions(self.tokens - draft.tokens, rows=rows - len(going), of=tuple(starters))

    def rows(self, draft: Draft) -> int:
        """Decodes of a step that keeps the readers' pace."""
        if not self.per_decode:
            return draft.spec.max_seqs
        return max(1, min(draft.spec.max_seqs, int((1 / self.rate - self.step) / self.per_decode)))

    def reader(self, request: RequestView) -> Reader:
        """Of this request's answer."""
        slo = request.slo
        ttft = self.ttft if slo.ttft == inf else slo.ttft
        return Reader(request.arrival + ttft, self.rate if slo.tpot == inf or not slo.tpot else 1 / slo.tpot)

    def value(self, draft: Draft, sequence: Sequence, speed: float) -> float:
        """Experience won for each token of KV."""
        serving = draft.now + (0.0 if sequence.decoding else self.prefill * sequence.remaining)
        reader = self.reader(sequence.request)
        return reader.gain(sequence.returned, serving, speed, draft.now + self.horizon) / sequence.length

    def ranked(self, draft: Draft, rows: int) -> list[Sequence]:
        """Running and the first waiting ones, the most valuable first; of equals those that run, then the oldest."""
        queue = (*draft.running, *islice(draft.waiting, self.window))
        speed = 1 / max(self.step + self.per_decode * min(rows, len(queue)), 1e-9)

        def key(sequence: Sequence) -> tuple[float, bool, float, int]:
            waits = sequence.state is not State.RUNNING
            return -self.value(draft, sequence, speed), waits, sequence.request.arrival, sequence.id

        return sorted(queue, key=key)

    def _packed(self, draft: Draft, ranked: Iterable[Sequence], rows: int) -> list[Sequence]:
        """As many of them as fit, passing over those that do not."""
        room = int(draft.spec.blocks * (1 - self.reserve)) - draft.blocks_freeing
        chosen: list[Sequence] = []
        for sequence in ranked:
            if len(chosen) == rows:
                break
            need = draft.spec.blocks_for(sequence.length)
            if need <= room:
                room -= need
                chosen.append(sequence)
        return chosen

    def _victims(self, draft: Draft, starters: list[Sequence], paused: list[Sequence]) -> list[Sequence]:
        """Of those that pause, the least valuable, for as many starters as they make room and seats for."""
        kept = int(draft.spec.blocks * self.reserve)
        free, seats = draft.blocks_free + draft.blocks_freeing - kept, draft.seats
        ready = [s for s in paused if s.preemptions < self.preemptions and not s.in_flight]
        victims: list[Sequence] = []
        for starter in starters:
            need = draft.spec.blocks_for(starter.length + 1)
            more: list[Sequence] = []
            while (free < need or seats < 1) and ready:
                more.append(ready.pop())
                free, seats = free + len(more[-1].blocks), seats + 1
            if free < need or seats < 1:
                break
            free, seats = free - need, seats - 1
            victims += more
        return victims
