"""Latency objectives as admission and as a batching discipline: who starts, who is turned away, who decodes less often.

Steps are predicted by two constants; calibrate them for your device. The defaults are Llama-3.1-8B on an H200 by our
roofline: 16 GB of weights at 4.8 TB/s with overhead, 60 % of 989 TFLOP/s, and 4,000 tokens of context a decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence
from policies.admission import FullPrompt
from policies.composed import FOREVER, Admission, Admissions, Chunks, Decodes, Phase, tell_of_victims


@dataclass(frozen=True, slots=True)
class SloGuard:
    """When it leaves everybody's time between tokens as promised; turned away if its own objectives are out of reach.

    TTFT guard: rejects a new request whose first token would come later than its `slo.ttft`, were it started now:
    `step` + `prefill` seconds for each token of it and of prompts in progress. Meant with `order=edf` (least deadline
    first). TPOT guard: with the tightest `slo.tpot` s of all running and it, `step` + `per_decode` x Σ s / tpot_i must
    not exceed s: whoever is content with less counts for less (virtual batch size), which `budget=credits` makes true.
    Requests without an objective are not counted; one that not even an empty device could serve is rejected. `memory`
    decides beside it. Seconds. Source: SCORPIO, arXiv 2505.23022v1 (2025): both guards as its abstract and summaries
    have them; its learned predictors of lengths and times are these constants here.
    """

    prefill: float = 2.7e-5
    step: float = 0.005
    per_decode: float = 1.1e-4
    memory: Admission = FullPrompt()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        _check_seconds("admission", prefill=self.prefill, step=self.step, per_decode=self.per_decode)

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        if not sequence.promised and not sequence.preemptions and (why := self.out_of_reach(draft, sequence)):
            draft.reject(sequence, why)
            return False
        tpots = Counter([other.request.slo.tpot for other in draft.running])
        tpots[sequence.request.slo.tpot] += 1
        return self.keeps(tpots) and self.memory(draft, sequence, tokens)

    def out_of_reach(self, draft: Draft, sequence: Sequence) -> str | None:
        """Why a request's objectives cannot be kept, started now or ever; None if they can."""
        slo = sequence.request.slo
        alone = self.step + self.per_decode
        if slo.tpot < alone:
            return f"slo.tpot={slo.tpot:g} cannot be kept: a step of one decode takes {alone:g} s"
        if slo.ttft == inf:
            return None
        tokens = sequence.remaining - draft.prefix_hit(sequence) + sum([other.remaining for other in draft.partial])
        after = draft.now - sequence.request.arrival + self.step + self.prefill * tokens
        if after > slo.ttft:
            return f"slo.ttft={slo.ttft:g} cannot be kept: the first token would come after {after:.3g} s"
        return None

    def keeps(self, tpots: Mapping[float, int]) -> bool:
        """Whether a step of a virtual batch of so many of each objective keeps the tightest."""
        tightest = min(tpots)
        virtual = sum([many * tightest / tpot for tpot, many in tpots.items()]) if tightest < inf else 0.0
        return self.step + self.per_decode * virtual <= tightest

    def preempted(self, draft: Draft) -> None:
        tell_of_victims(self.memory, draft)


@dataclass(frozen=True, slots=True)
class Credits:
    """Chunked prefill in which decodes with a looser TPOT objective take part in fewer steps.

    Every decode that could be served earns s / tpot in a step, with s the tightest objective among them, and pays 1 for
    a token: it is served when it has 1. One without an objective earns `least`. With equal objectives all decodes are
    served, as in `chunked_prefill`. `tokens`: budget of a step, in all.
    Source: SCORPIO, arXiv 2505.23022v1 (2025), credit-based batching: from its abstract and summaries.
    """

    tokens: int = 2048
    least: float = 0.1
    _credits: dict[int, dict[int, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of each sequence, by rank."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"policy.budget.tokens={self.tokens} must be at least 1")
        if not 0 < self.least <= 1:
            raise ValueError(f"policy.budget.least={self.least} must lie in (0, 1]")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes(of=tuple(self._solvent(draft)))
        yield Chunks(self.tokens - draft.tokens)
        yield Admissions(self.tokens - draft.tokens)

    def _solvent(self, draft: Draft) -> list[Sequence]:
        credits = self._credits.setdefault(draft.rank, {})
        if len(credits) > 2 * len(draft.running) + 64:
            alive = {sequence.id for sequence in draft.running}
            for id in [id for id in credits if id not in alive]:
                del credits[id]
        tpots = [sequence.request.slo.tpot for sequence in draft.decoding]
        tightest = min(tpots, default=inf)
        if tightest == inf:
            return draft.decoding
        earned = {tpot: self.least if tpot == inf else max(tightest / tpot, 1e-3) for tpot in set(tpots)}
        chosen: list[Sequence] = []
        for sequence, tpot in zip(draft.decoding, tpots, strict=True):
            credit = credits.get(sequence.id, 0.0) + earned[tpot]
            if credit > 1 - 1e-9:  # ten tenths are not quite one
                chosen.append(sequence)
                credit -= 1
            credits[sequence.id] = credit
        return chosen

    def steady(self, draft: Draft) -> int:
        tpots = {sequence.request.slo.tpot for sequence in draft.running}
        return FOREVER if len(tpots) == 1 else 0


def _check_seconds(choice: str, **options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < inf:
            raise ValueError(f"policy.{choice}.{name}={value} must be 0 or more seconds")
