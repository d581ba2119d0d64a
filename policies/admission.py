"""May this waiting sequence start now?

A rule that says no stops the queue. None of them can shut a request out for ever: an idle rank starts its first.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.draft import Draft
from playground.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Always:
    """As soon as the blocks of its first chunk are free, which over-admits.

    Source: vLLM v1 before March 2026 (PR #37307).
    """

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Watermark:
    """When its first chunk leaves `fraction` of the pool free (in whole blocks), so that running sequences can grow.

    Source: vLLM v0 (`watermark` 0.01, block_manager `can_allocate` and `can_swap_in`), whose first chunk is the whole
    prompt.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        _check_fraction("policy.admission.fraction", self.fraction)

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        cached = draft.prefix_hit(sequence) if sequence.state is State.WAITING else 0
        needed = draft.blocks_needed(sequence, cached + tokens)
        return draft.blocks_free - needed >= _watermark(draft, self.fraction)


@dataclass(frozen=True, slots=True)
class FullPrompt:
    """When the whole prompt fits beside what prompts already admitted still need, and `watermark` of the pool is left.

    Source: Sarathi-Serve (OSDI'24), whose block manager allocates a prompt at admission; vLLM's
    `scheduler_reserve_full_isl` (PR #37307, March 2026).
    """

    watermark: float = 0.01

    def __post_init__(self) -> None:
        _check_fraction("policy.admission.watermark", self.watermark)

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        needed = draft.blocks_needed(sequence, sequence.remaining) + draft.blocks_owed
        return draft.blocks_free - needed >= _watermark(draft, self.watermark)


@dataclass(frozen=True, slots=True)
class MaxLength:
    """When prompt and `max_tokens` of it and of everybody running fit together: nobody is ever preempted.

    Source: Orca (OSDI'22), which reserves a slot for each request's longest output; TensorRT-LLM calls it
    GUARANTEED_NO_EVICT.
    """

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        blocks_for = draft.spec.blocks_for
        promised = sum(blocks_for(other.max_length) for other in draft.running)
        return promised + blocks_for(sequence.max_length) <= draft.spec.blocks


def _watermark(draft: Draft, fraction: float) -> int:
    """So many blocks stay free: rounded down, as vLLM and Sarathi-Serve have it."""
    return int(fraction * draft.spec.blocks)


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie in [0, 1)")
