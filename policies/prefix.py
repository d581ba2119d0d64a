"""Orders that look into the prefix cache, for as long as few enough wait.

A look costs a lookup of every prompt that waits: a microsecond each, where prompts begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence, State
from policies.order import Fcfs, Key, by_key, check_ageing
from policies.ranking import Ranking

FALLBACK = 128
SHARED = 32


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """Longest prefix match: whose prompt has most tokens in the cache comes first; ties by place in the queue.

    A prompt of which at most `shared` tokens are cached, and which shares at least `shared` with one before it in the
    queue, comes after all others: when that one is computed, it finds its prefix. With more than `fallback` waiting the
    queue is served in order, for looking all of them up takes too long. `shared`: tokens; `fallback`: requests.
    Prompts that nobody shares starve under load.
    Source: SGLang 00550cd, `lpm` (`IN_BATCH_PREFIX_CACHING_*_THRESHOLD` 32, 128 waiting).
    """

    fallback: int = FALLBACK
    shared: int = SHARED

    def __post_init__(self) -> None:
        _check(self.fallback, self.shared)

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        if len(draft.waiting) > self.fallback:
            return Fcfs()(draft)
        return _by_match(draft, self.shared, lambda sequence, matched: -matched)


@dataclass(frozen=True, slots=True)
class Hrrn:
    """Highest response ratio next: most time waited for each token that is still to be prefilled.

    The ratio is 1 + waited / time to prefill what is not cached; at a constant speed its order is that of seconds
    waited by tokens. Short prompts come first, and long ones in the end. A prompt that is cached comes at once, one
    that shares at least `shared` tokens with one before it last, as in `longest_prefix`; with more than `fallback`
    waiting the queue is served in order. Source: SGLang 00550cd, `hrrn`, which measures waiting in tokens prefilled
    meanwhile; Brinch Hansen, Operating System Principles (1973).
    """

    fallback: int = FALLBACK
    shared: int = SHARED

    def __post_init__(self) -> None:
        _check(self.fallback, self.shared)

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        def ratio(sequence: Sequence, matched: int) -> float:
            if sequence.remaining <= matched:
                return -inf
            return -(draft.now - sequence.request.arrival) / (sequence.remaining - matched)

        if len(draft.waiting) > self.fallback:
            return Fcfs()(draft)
        return _by_match(draft, self.shared, ratio)


@dataclass(frozen=True, slots=True)
class ShortestPrefill:
    """Shortest prefill first: fewest tokens that are still to be computed, those in the cache not counted.

    A long prompt that is cached is a short one. Ties by place in the queue. One that shares at least `shared` tokens
    with one before it comes last, as in `longest_prefix`; with more than `fallback` waiting nobody is looked up, and
    whole prompts count. `ageing`: tokens of advantage for each second waited; with 0 a long prompt starves for as long
    as shorter ones keep coming. It orders those that wait: a long prompt under way takes the whole budget of a step
    unless `policy.budget.long_prefill_threshold` (`vllm_v1`) leaves room beside it.
    Source: SRPT on uncached tokens, as asked for in vLLM #57413 and made in PR #51375 ("residual-aware SJF", open in
    August 2026, from its description; it ages by a limit on waiting) and in SGLang's `shortest-prefill-first` (2026,
    from its tests).
    """

    ageing: float = 0.0
    fallback: int = FALLBACK
    shared: int = SHARED
    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ageing(self.ageing, "tokens")
        _check(self.fallback, self.shared)

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        if len(draft.waiting) > self.fallback:
            return by_key(self._ranks, self.key, draft)
        return _by_match(draft, self.shared, self._cost)

    def key(self, sequence: Sequence) -> Key:
        return (self._cost(sequence, 0),)

    def _cost(self, sequence: Sequence, matched: int) -> float:
        """Tokens to compute. All have aged for as long as the clock runs since: what tells them apart is arrival."""
        return max(sequence.remaining - matched, 1) + self.ageing * sequence.request.arrival


def _by_match(draft: Draft, shared: int, rate: Callable[[Sequence, int], float]) -> Iterator[Sequence]:
    """In order of (postponed, rate, place in the queue); nobody while no seat is free, for nobody could be admitted."""
    if draft.seats < 1:
        return
    deep = -(-shared // draft.spec.block_size)
    seen: dict[Hashable, None] = {}
    ranked: list[tuple[bool, float, int, Sequence]] = []
    for place, sequence in enumerate(draft.waiting):
        matched = sequence.launched if sequence.state is State.SWAPPED else draft.prefix_hit(sequence)
        postponed = False
        if matched <= shared and len(sequence.keys) >= deep:
            postponed = sequence.keys[deep - 1] in seen  # keys are chained: this one stands for all before it
            seen[sequence.keys[deep - 1]] = None
        ranked.append((postponed, rate(sequence, matched), place, sequence))
    heapify(ranked)
    while ranked:
        yield heappop(ranked)[3]


def _check(fallback: int, shared: int) -> None:
    if fallback < 0:
        raise ValueError(f"policy.order.fallback={fallback} must be 0 (always in order) or more waiting sequences")
    if shared < 1:
        raise ValueError(f"policy.order.shared={shared} must be at least 1 token")
