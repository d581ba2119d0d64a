"""Batch sizes that CUDA graphs are captured for: the engine captures them, cost models pad to them."""

from __future__ import annotations


def decode_sizes(most: int) -> tuple[int, ...]:
    """Sizes of batches up to `most`: fine steps where a row more costs time, coarse ones beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(640, most + 128, 128)]
    return (*(size for size in sizes if size < most), most)
