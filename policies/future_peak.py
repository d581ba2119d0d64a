"""Admission by the most memory that the admitted will ever need at once, were their answers as long as predicted."""

from __future__ import annotations

from dataclasses import dataclass

from playground.draft import Draft
from playground.sequence import Sequence
from policies.predictors import MaxTokens, Predictor


@dataclass(frozen=True, slots=True)
class FuturePeak:
    """When everybody admitted and it fit together at each moment at which one of them is predicted to end.

    With b_i the tokens of prompt and answer so far (less the last, which has no KV) and o_i the predicted tokens to
    come, Σ over {i: o_i >= o_j} of (b_i + o_j) must fit for every j: in between memory only grows. Each sequence counts
    block size - 1 tokens more, for its last block; shared prefixes count for everybody. Whoever outlives its prediction
    counts as ending with its next token. Nobody is preempted if lengths are not longer than predicted, prompts are
    computed in the step that admits them and everybody decodes in every step; a longer prefill shifts peaks.
    `predictor`: `max_tokens` (safe), a predictor that errs, or the oracle, as in the paper. `policy=mc_sf` has it with
    `order=sjf`, of the same predictor, and whole prompts.
    Source: MC-SF, arXiv 2502.07115 (2025), the rule from its abstract and summaries.
    """

    predictor: Predictor = MaxTokens()  # noqa: RUF009  (frozen)

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        if draft.blocks_needed(sequence, sequence.remaining) + draft.blocks_owed > draft.blocks_free:
            return False
        size = draft.spec.block_size
        room = (draft.spec.blocks - draft.blocks_freeing) * size
        predictor, ends = self.predictor, []
        for one in (*draft.running, sequence):  # no call for each: every prompt that comes in comes here
            most, end = one.max_tokens, round(predictor(one.request))
            left = (end if end < most else most) - one.promised
            ends.append((left if left > 1 else 1, one.length + size - 2))
        return fits(ends, room)


def fits(held: list[tuple[int, int]], room: int) -> bool:
    """Whether sequences that hold so many tokens, (to come, now) each, and get one a tick fit until all have ended."""
    held.sort(reverse=True)
    base = 0
    for count, (left, now) in enumerate(held, 1):
        base += now
        if base + count * left > room:
            return False
    return True
