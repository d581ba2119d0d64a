"""Forward passes of one size: Dynamic SplitFuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from playground.draft import Draft
from policies.composed import Admissions, Chunks, Decodes, Phase


@dataclass(frozen=True, slots=True)
class ExactFill:
    """Dynamic SplitFuse: every step has `tokens` tokens, no more ever, and no fewer while so many are there to do.

    Decodes first; long prompts are cut, short ones put together until the size is met, the last of them cut, too.
    Unlike in `chunked_prefill` decodes count as well: of more than `tokens` the least recently served are taken.
    Source: DeepSpeed-FastGen (blog of November 2023); DeepSpeed-MII, `RaggedBatchBase.schedule_requests`, whose
    `max_ragged_batch_size` is 768. Meant with `admission=full_prompt`: a prompt starts when all of it fits. Not taken
    over: a decode without a block waits there, and memory is taken from the last prompt only if nothing at all can run.
    """

    tokens: int = 768

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"policy.budget.tokens={self.tokens} must be at least 1")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes(self.tokens)
        yield Chunks(self.tokens - draft.tokens)
        yield Admissions(self.tokens - draft.tokens)

    def steady(self, draft: Draft) -> int:
        return self.tokens
