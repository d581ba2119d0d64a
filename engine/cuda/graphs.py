"""Decode steps as captured graphs, one for each size of batch in a list; smaller batches are padded to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from engine.cuda.timeline import Timeline, Work


def buckets(most: int) -> tuple[int, ...]:
    """Sizes of batches up to `most`: fine steps where a row more costs time, coarse ones beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(640, most + 128, 128)]
    return (*(size for size in sizes if size < most), most)


class Graphs:
    """Captured decodes by size and kind; what was not captured at the start is captured on first use."""

    def __init__(self, decode: Callable[[Tensor, bool], Tensor], most: int, scratch: int, timeline: Timeline) -> None:
        self._decode = decode
        self._scratch = scratch
        self._timeline = timeline
        self.sizes = buckets(most)
        self._rows = torch.zeros(2 * most, dtype=torch.int64, device=timeline.device)
        """Where all graphs read their rows: one runs at a time."""
        self._captured: dict[tuple[int, bool], Work] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def size(self, rows: int) -> int | None:
        """The size that so many rows are padded to; None if they are too many."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def capture_all(self, draws: bool) -> None:
        """The largest first: the smaller ones find room in the memory that it left."""
        for size in reversed(self.sizes):
            self._graph(size, draws)

    def run(self, rows: Tensor, draws: bool) -> Tensor:
        """Queue a decode of padded rows [2 * size] -> ids [size], good until the next run."""
        replay = self._graph(len(rows) // 2, draws)
        self._rows[: len(rows)].copy_(rows)
        return replay()

    def _graph(self, size: int, draws: bool) -> Work:
        if (size, draws) not in self._captured:
            rows = self._rows[: 2 * size]
            # Capturing runs the work, too: for nobody, since other rows' blocks may belong to others by now.
            rows[:size] = self._scratch
            rows[size:] = 0
            self._captured[size, draws] = self._timeline.capture(lambda: self._decode(rows, draws))
        return self._captured[size, draws]
