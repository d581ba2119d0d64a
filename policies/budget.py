"""How many prefill tokens and decodes make up a step: the batching disciplines.

Each class is one discipline: its rule, its parameters (tokens unless said otherwise) and where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from playground.draft import Draft
from policies.composed import FOREVER, Admissions, Chunks, Decodes, Phase, Running


def _positive(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"policy.budget.{name}={value} must be at least 1")


@dataclass(frozen=True, slots=True)
class Static:
    """Request-level batching: up to `batch` requests start together; the next batch when all of them have ended.

    Prompts enter whole, over several steps if one does not hold them; the first decode closes the batch. Meant with
    `admission=max_length`, for a slot holds its longest output. Source: FasterTransformer; `faster_transformer` in
    Vidur 7d47513 and Sarathi-Serve 13f16cf. Not taken over: a batch of its own for each pipeline stage.
    """

    batch: int = 16

    def __post_init__(self) -> None:
        _positive(batch=self.batch)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Chunks()
        if all(sequence.promised <= 1 for sequence in draft.running):
            yield Admissions(rows=self.batch - len(draft.running), whole=True)
        if not draft.tokens:
            yield Decodes()

    def steady(self, draft: Draft) -> int:
        return FOREVER


@dataclass(frozen=True, slots=True)
class Orca:
    """Iteration-level batching: up to `batch` requests a step, those that run before whole new prompts.

    In a pipeline every micro-batch has so many. Meant with `admission=max_length`: memory for the longest output is
    reserved at the start. Source: Orca (OSDI'22), Algorithm 1; `orca_scheduler` and batch 16 as in Sarathi-Serve's
    artefact (13f16cf).
    """

    batch: int = 16

    def __post_init__(self) -> None:
        _positive(batch=self.batch)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes(self.batch)
        yield Chunks()
        yield Admissions(rows=self.batch - draft.rows, whole=True)

    def steady(self, draft: Draft) -> int:
        return self.batch


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Whole prompts first, alone in their step, up to `tokens`; decodes only when no prompt can start.

    Every decode stalls for as long as a prompt takes. Source: vLLM v0 (SOSP'23), default scheduler without chunking, as
    `vllm_scheduler` in Sarathi-Serve 13f16cf has it.
    """

    tokens: int = 4096

    def __post_init__(self) -> None:
        _positive(tokens=self.tokens)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Chunks(self.tokens)  # only of a recomputation too long for one step
        yield Admissions(self.tokens - draft.tokens, whole=True)
        if not draft.tokens:
            yield Decodes()

    def steady(self, draft: Draft) -> int:
        return FOREVER


@dataclass(frozen=True, slots=True)
class Unified:
    """One budget of `tokens` without phases: running sequences in order of admission, then waiting ones.

    After a preemption nobody is admitted in the same step. `long_prefill_threshold` caps the tokens of one sequence
    (0: off), unless it is the only one (since PR #57951, September 2026). `max_partial` bounds how many prompts may be
    under way, those included that start or end in this step (0: off): it holds back new ones only. Without these, and
    while nobody is preempted, the decisions are those of `chunked_prefill`: the prompt in chunks is the last admitted,
    so all decodes come before it. In a pipeline a micro-batch is whoever is not in flight: those batched once stay
    together, and groups drift apart in size. Source: vLLM v1 scheduler at 00024d3 (`max_num_batched_tokens` 2048,
    `long_prefill_token_threshold`); `max_concurrent_prefills` of PRs #55256 and #57427, not merged by September 2026.
    """

    tokens: int = 2048
    long_prefill_threshold: int = 0
    max_partial: int = 0

    def __post_init__(self) -> None:
        _positive(tokens=self.tokens)
        for name in ("long_prefill_threshold", "max_partial"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"policy.budget.{name}={value} must be 0 (off) or more")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        alone = len(draft.running) + len(draft.waiting) == 1
        each = FOREVER if alone else self.long_prefill_threshold or FOREVER
        yield Running(self.tokens, each)
        if draft.preempted:
            return
        rows = self.max_partial - len(draft.partial) if self.max_partial else FOREVER
        yield Admissions(self.tokens - draft.tokens, rows, each)

    def steady(self, draft: Draft) -> int:
        return FOREVER


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """Stall-free batching: all decodes first, then chunks of admitted prompts, then new ones, up to `tokens` in all.

    Decodes are never held back for the budget. Source: Sarathi-Serve (OSDI'24), `sarathi_scheduler` at 96f9911;
    budget 512 (strict) to 2048 (relaxed SLO).
    """

    tokens: int = 2048

    def __post_init__(self) -> None:
        _positive(tokens=self.tokens)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes()
        yield Chunks(self.tokens - draft.tokens)
        yield Admissions(self.tokens - draft.tokens)

    def steady(self, draft: Draft) -> int:
        return FOREVER


@dataclass(frozen=True, slots=True)
class TokenThrottling:
    """Prefill throttled by waiting work and by free KV, decodes spread evenly over the pipeline's micro-batches.

    With WP tokens waiting for prefill, F the free share of the KV pool, RD running decodes and PP stages:

        prefill = max(min(WP / spread, max_prefill * (F - kv_threshold) / (1 - kv_threshold)), min_prefill)
        prefill = 0 if F < kv_threshold
        decodes = RD / PP, rounded up

    `wt=False` leaves out the first term of the minimum, `ut=False` the second and the suspension (the paper's
    ablations). Where the paper is silent: prefill is chosen before decodes, and the next chunk of a prompt may
    follow while one is in flight.
    Source: gLLM, arXiv 2504.14775v2 (SC'25), Eq. 3 and 4, defaults of §4.1.
    """

    max_prefill: int = 2048
    min_prefill: int = 32
    spread: int = 8
    kv_threshold: float = 0.05
    wt: bool = True
    ut: bool = True

    def __post_init__(self) -> None:
        check_throttle(self.max_prefill, self.min_prefill, self.spread, self.kv_threshold)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        prefill = self.prefill(waiting_for_prefill(draft), draft.kv_free)
        decodes = -(-running_decodes(draft) // draft.spec.stages)  # of now: not the prompts that this step ends
        yield Chunks(prefill)
        yield Admissions(prefill - draft.tokens)
        yield Decodes(decodes)

    def prefill(self, waiting: int, free: float) -> int:
        """Prefill tokens of a step; `waiting` tokens wait and `free` of the KV pool is free."""
        wanted = float(self.max_prefill)
        if self.wt:
            wanted = min(waiting / self.spread, wanted)
        if self.ut:
            if free < self.kv_threshold:
                return 0
            wanted = min(wanted, self.max_prefill * _headroom(free, self.kv_threshold))
        return int(max(wanted, self.min_prefill))

    def steady(self, draft: Draft) -> int:
        return -(-len(draft.running) // draft.spec.stages)


@dataclass(frozen=True, slots=True)
class TokenThrottling2025:
    """Token throttling as its authors' code had it in April 2025.

    With B the KV above the threshold th = `kv_threshold` in tokens, N the decodes and everything else in flight, and PP
    stages > 1:

        prefill = min(max(WP // spread, min_prefill), round(UT * max_prefill), B), UT = (F - th) / (1 - th), >= 0
        decodes = N if N < PP else (N + randint(0, PP - 1)) // PP

    so the floor does not hold when KV is tight, unlike in the paper. With one stage: prefill = min(max_prefill, B).
    A prompt has one chunk in flight at a time, and its rest does not count as waiting meanwhile. `wt=False` leaves out
    the first term of the minimum, `ut=False` sets UT to 1. Not taken over: its last-in-first-out decode queue (the
    least recently served go first here) and preempting one page ahead for every decode.
    Source: gty111/gLLM 52fbd4b, `pp_scheduler.py`.
    """

    max_prefill: int = 2048
    min_prefill: int = 32
    spread: int = 8
    kv_threshold: float = 0.05
    wt: bool = True
    ut: bool = True

    def steady(self, draft: Draft) -> int:
        return FOREVER if draft.spec.stages == 1 else 0  # elsewhere it draws a random number at every step

    def __post_init__(self) -> None:
        check_throttle(self.max_prefill, self.min_prefill, self.spread, self.kv_threshold)

    def phases(self, draft: Draft) -> Iterator[Phase]:
        in_flight = sum(sequence.remaining for sequence in draft.partial if sequence.in_flight)
        prefill = self.prefill(waiting_for_prefill(draft) - in_flight, draft)
        yield Chunks(prefill, idle=True)
        yield Admissions(prefill - draft.tokens)
        yield Decodes(self.decodes(len(draft.decoding) + draft.rows_in_flight, draft))

    def prefill(self, waiting: int, draft: Draft) -> int:
        """Prefill tokens of a step."""
        spec = draft.spec
        room = spec.block_size * max(draft.blocks_free - int(self.kv_threshold * spec.blocks), 0)
        room = min(self.max_prefill, room)
        if spec.stages == 1:
            return room
        if self.ut:
            room = min(round(max(_headroom(draft.kv_free, self.kv_threshold), 0.0) * self.max_prefill), room)
        if self.wt:
            room = min(max(waiting // self.spread, self.min_prefill), room)
        return room

    def decodes(self, rows: int, draft: Draft) -> int:
        """Decodes of a step; `rows` are ready or in flight."""
        stages = draft.spec.stages
        if stages == 1 or rows < stages:
            return rows
        return (rows + draft.rng.randint(0, stages - 1)) // stages


def waiting_for_prefill(draft: Draft) -> int:
    """Prompt tokens that have not been asked for: of waiting sequences and of partly prefilled ones."""
    return draft.waiting_tokens + sum(sequence.remaining for sequence in draft.partial)


def running_decodes(draft: Draft) -> int:
    """Sequences that decode, in flight or not; one that is being recomputed does not."""
    return sum([one.promised > 0 and one.length - one.launched == 1 for one in draft.running])


def _headroom(free: float, threshold: float) -> float:
    """Where `free` lies between the threshold (0) and an empty pool (1); negative below the threshold."""
    return (free - threshold) / (1 - threshold)


def check_throttle(max_prefill: int, min_prefill: int, spread: int, kv_threshold: float = 0.0) -> None:
    """The ranges of what throttles have in common."""
    _positive(max_prefill=max_prefill, min_prefill=min_prefill, spread=spread)
    if not 0 <= kv_threshold < 1:
        raise ValueError(f"policy.budget.kv_threshold={kv_threshold} must lie in [0, 1)")
