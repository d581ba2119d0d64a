"""Sizes of steps that CUDA graphs are captured for: the engine captures them, cost models pad to them."""

from __future__ import annotations


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
