"""Decodes spread evenly over a pipeline's micro-batches: gLLM's scheduler of July 2026, and that part of it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from playground.draft import Draft
from policies.budget import check_throttle, running_decodes, waiting_for_prefill
from policies.composed import FOREVER, Admissions, Chunks, Decodes, Phase
from policies.reserve import DecodeReserve


@dataclass(frozen=True, slots=True)
class BalancedDecode:
    """Chunked prefill whose decodes are spread evenly over the pipeline: RD / stages a step, rounded up.

    RD are the sequences that decode, in flight or not; prompts get what is left of `tokens`. With one stage it is
    `chunked_prefill`. It tells what of token throttling's gain is the even split's.
    Source: gLLM main since `a5bca71` (December 2025), `chunked_prefill`, without its reserve for decodes and its
    rotating remainder (`token_throttling_2026` has both).
    """

    tokens: int = 2048

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes(ceil(running_decodes(draft) / draft.spec.stages))
        yield Chunks(self.tokens - draft.tokens)
        yield Admissions(self.tokens - draft.tokens)

    def steady(self, draft: Draft) -> int:
        return ceil(len(draft.running) / draft.spec.stages)


@dataclass(slots=True)
class Rotation:
    """N rows over S stages: 1 while N < S, else (N + j) // S with j counting 0, 1, ..., S - 1 from call to call.

    Without j, of 5 rows on 4 stages one would always be late. Source: gLLM bc91d98,
    `get_balanced_decode_token_budget`.
    """

    _calls: dict[int, int] = field(default_factory=dict)
    """By rank: those that divided."""

    def share(self, rows: int, draft: Draft) -> int:
        """Decodes of this step."""
        stages = draft.spec.stages
        if rows < stages:
            return 1
        calls = self._calls.get(draft.rank, 0)
        self._calls[draft.rank] = calls + 1
        return (rows + calls % stages) // stages


@dataclass(frozen=True, slots=True)
class TokenThrottling2026:
    """Token throttling as its authors' code had it in July 2026.

    With R the blocks that `reserve` keeps for decodes, B the KV of the other free blocks in tokens, r = min(R / blocks,
    0.99), N the decodes and everything else in flight, and PP stages:

        prefill = min(round(UT * max_prefill), B), UT = max((F - r) / (1 - r), 0)
        prefill = min(prefill, max(WP // spread, min_prefill)) if more than one prompt waits or is under way
        decodes = 1 if N < PP else (N + j) // PP, j = 0, 1, ..., PP - 1 by turns

    so a lone prompt is not throttled by what waits. With one stage and one rank: prefill = min(max_prefill, B). The
    next chunk of a prompt may follow while one is in flight. The original throttles under tensor parallelism as well,
    which no policy here sees.
    Source: gty111/gLLM bc91d98, `scheduler.py`, `token_throttling`; `maxp` 8192 as in its server. Its default is
    `chunked_prefill` (here `balanced_decode`). Not taken over: its last-in-first-out decode queue (the least recently
    served go first here), and preempting one page ahead for every decode. Meant with `victims=largest`.
    """

    max_prefill: int = 8192
    min_prefill: int = 32
    spread: int = 8
    reserve: DecodeReserve = field(default_factory=DecodeReserve)
    _rotation: Rotation = field(default_factory=Rotation, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_throttle(self.max_prefill, self.min_prefill, self.spread)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        prefill = self.prefill(draft)
        yield Chunks(prefill)
        yield Admissions(prefill - draft.tokens)
        yield Decodes(self._rotation.share(len(draft.decoding) + draft.rows_in_flight, draft))
        if draft.preempted:
            self.reserve.preempted(draft)

    def prefill(self, draft: Draft) -> int:
        """Prefill tokens of a step."""
        prompts = len(draft.waiting) + len(draft.partial)
        if not prompts:
            return 0
        spec, reserved = draft.spec, self.reserve.reserve(draft)
        most = spec.block_size * max(draft.blocks_free - reserved, 0)
        if spec.stages == spec.ranks == 1:
            return min(self.max_prefill, most)
        kept = min(reserved / spec.blocks, 0.99)
        most = min(round(max((draft.kv_free - kept) / (1 - kept), 0.0) * self.max_prefill), most)
        if prompts > 1:
            most = min(max(waiting_for_prefill(draft) // self.spread, self.min_prefill), most)
        return most

    def steady(self, draft: Draft) -> int:
        return FOREVER if draft.spec.stages == 1 else 0  # elsewhere turns are counted at every step


@dataclass(frozen=True, slots=True)
class SplitPd:
    """Prompts alone in their step while any waits and memory is there, else decodes, spread evenly over the pipeline.

    While a prompt waits or is under way, and no fewer blocks are free than `reserve` keeps for decodes, no decode is
    taken, unless no prompt could be computed either. Otherwise decodes come first: 1 of N < PP, else (N + j) // PP as
    in `token_throttling_2026`. Prompts get what is left of `tokens`, in blocks that are not reserved.
    Source: gty111/gLLM bc91d98, `scheduler.py`, `--schedule-method split_pd`; `maxp` 8192 as in its server. Its decode
    queue is last-in-first-out; here the least recently served go first. Meant with `victims=largest`.
    """

    tokens: int = 8192
    reserve: DecodeReserve = field(default_factory=DecodeReserve)
    _rotation: Rotation = field(default_factory=Rotation, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        prompts = bool(draft.waiting or draft.partial)
        reserved = self.reserve.reserve(draft) if prompts else 0
        decodes = self._rotation.share(len(draft.decoding) + draft.rows_in_flight, draft)
        alone = prompts and draft.blocks_free >= reserved
        if not alone:
            yield Decodes(min(decodes, self.tokens))
        if draft.preempted and not prompts:
            reserved = self.reserve.reserve(draft)  # the victims are prompts now
        room = draft.spec.block_size * max(draft.blocks_free - reserved, 0)
        most = min(self.tokens, draft.tokens + room)
        yield Chunks(most - draft.tokens)
        yield Admissions(most - draft.tokens)
        if alone and not draft.tokens:
            yield Decodes(min(decodes, self.tokens))
        if draft.preempted:
            self.reserve.preempted(draft)

    def steady(self, draft: Draft) -> int:
        # With one stage all are taken; prompts without a seat leave the step to decodes, one way or the other.
        return self.tokens if draft.spec.stages == 1 else 0


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"policy.budget.tokens={tokens} must be at least 1")
