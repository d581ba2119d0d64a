"""Where a step's batch is cut into two that take turns: the same place in the simulator and on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """What the first batch has; prompts come before rows of one token, each in the order of the step."""

    prompts: int
    """Whole ones."""
    inside: int = 0
    """Tokens of the next one, whose later part sees these."""
    rows: int = 0
    """Beside prompts."""


def cut(lengths: Sequence[int], rows: int, threshold: float) -> Cut:
    """Of prompts of these lengths and so many rows besides, so that it halves the tokens; a side may be empty.

    A prompt in the middle goes to one side whole unless the smaller side then had less than `threshold` of the tokens;
    then it is cut (SGLang's `tbo_token_distribution_threshold`).
    """
    tokens = sum(lengths) + rows
    middle, before = tokens // 2, 0
    for index, length in enumerate(lengths):
        if before + length > middle:
            whole = before if middle - before <= before + length - middle else before + length
            if min(whole, tokens - whole) < threshold * tokens:
                return Cut(index, inside=middle - before)
            return Cut(index + (whole > before))
        before += length
    return Cut(len(lengths), rows=middle - before)
