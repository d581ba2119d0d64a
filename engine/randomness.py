"""Random numbers that depend on their names only, not on who asks first: the same token whatever the batch.

SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: number i of stream s is mix(mix(s) + i).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def words(values: Sequence[int]) -> Words:
    """Python integers of any size and sign as 64-bit words."""
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def mix(values: Words) -> Words:
    """A bijection of 64-bit words that looks like chance."""
    z = values + _STEP
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
