"""Prompts in chunks before decodes: SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from playground.draft import Draft
from policies.composed import FOREVER, Admissions, Chunks, Decodes, Phase


@dataclass(frozen=True, slots=True)
class ChunkedPrefillFirst:
    """Prompts first, up to `tokens`, the last of them cut; decodes only in a step that computes none.

    At most one prompt is half computed: it goes on before anybody else starts. Every decode stalls for as long as
    prompts keep coming. `mixed`: decodes share a step with prompts and take their tokens from its budget, even if
    nothing is left of that for prompts.
    Source: SGLang, `get_new_batch_prefill` and `PrefillAdder` at 00550cd (2026): `chunked_prefill_size` 8192 on an
    80 GB device, `enable_mixed_chunk` off. Not taken over: `max_prefill_tokens` (16384), which binds only without
    chunks, and cutting prompts at ends of pages. Its admission is `new_token_ratio`.
    """

    tokens: int = 8192
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"policy.budget.tokens={self.tokens} must be at least 1")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        prefill = self.tokens - len(draft.decoding) if self.mixed else self.tokens
        yield Chunks(prefill)
        yield Admissions(prefill - draft.tokens)
        if self.mixed or not draft.tokens:
            yield Decodes()

    def steady(self, draft: Draft) -> int:
        return FOREVER
