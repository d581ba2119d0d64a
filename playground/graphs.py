"""Sizes of steps that CUDA graphs are captured for: the engine captures them, cost models pad to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


def decode_sizes(most: int) -> tuple[int, ...]:
    """Sizes of batches up to `most`: fine steps where a row more costs time, coarse ones beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(640, most + 128, 128)]
    return (*(size for size in sizes if size < most), most)


PREFILL_SIZES = (80, 144, 272, 528)
"""Prefill tokens of mixed steps: common chunks, and a token more for those whose successor nobody wants."""
CHUNKS = 16
"""Chunks of prompts that a mixed step's graph has room for."""


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Decodes beside prefills: multiples of 8, which is how many the engine reads at a time."""
    most += -most % 8
    return (*(size for size in (8, 32, 64, 128, 192, 256, 384, 512, 768) if size < most), most)


class Bucket(NamedTuple):
    """What a step is padded to: rows of decodes, and prefill tokens (0: there is nothing but decodes)."""

    rows: int
    tokens: int = 0


def bucket(decodes: int, tokens: int, chunks: int, most: int) -> Bucket | None:
    """Of a step of `decodes` slices of one token and `chunks` longer ones of `tokens` in all; None: no graph takes it.

    `most`: decodes that graphs are captured for.
    """
    if not tokens:
        rows = _next(decode_sizes(most), decodes)
        return None if rows is None else Bucket(rows)
    rows, size = _next(mixed_sizes(most), decodes), _next(PREFILL_SIZES, tokens + 1)
    if rows is None or size is None or chunks > CHUNKS:
        return None
    return Bucket(rows, size)


def _next(sizes: Sequence[int], count: int) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
