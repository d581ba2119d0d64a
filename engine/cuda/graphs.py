"""Small steps as captured graphs, one for each shape in a list; smaller batches are padded to the next.

What a graph saves is the host's time for hundreds of launches, which a step of many tokens hides anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.cuda.forward import Forward, Picked, Shape
from engine.cuda.residents import Batch
from engine.cuda.state import Picking
from engine.cuda.timeline import Timeline, Work
from playground.graphs import CHUNKS, PREFILL_SIZES, decode_sizes, mixed_sizes


class Graphs:
    """Captured steps by shape and kind; what was not captured at the start is captured on first use."""

    def __init__(
        self,
        forward: Forward,
        most: int,
        scratch: int,
        timeline: Timeline,
        tokens: Sequence[int] = PREFILL_SIZES,
    ) -> None:
        self._forward = forward
        self._scratch = scratch
        self._timeline = timeline
        self._decodes = decode_sizes(most)
        self._mixed = mixed_sizes(most)
        self._tokens = tuple(tokens)
        largest = max(sum(shape.sizes) for shape in self.shapes())
        self._packed = torch.zeros(largest, dtype=torch.int64, device=timeline.device)
        """Where all graphs read their batch: one runs at a time."""
        self._captured: dict[tuple[Shape, Picking | None], Work] = {}
        self._logits: Tensor | None = None
        """Where graphs that do not pick leave their logits: one place for all, made when somebody needs it."""

    def __len__(self) -> int:
        return len(self._captured)

    def shapes(self) -> Iterator[Shape]:
        """All that can be captured, the largest of each kind first."""
        for tokens in reversed(self._tokens):
            for decodes in reversed(self._mixed):
                yield _mixed_shape(decodes, tokens)
        for decodes in reversed(self._decodes):
            yield Shape(decodes)

    def shape(self, batch: Batch) -> Shape | None:
        """The shape that a batch is padded to; None if it is too large."""
        slices, singles = len(batch.starts), batch.singles
        if batch.nothing_but_decodes:
            decodes = _next(self._decodes, slices)
            return None if decodes is None else Shape(decodes)
        rows = _next(self._mixed, singles)
        tokens = _next(self._tokens, int(batch.lengths.sum()) - singles + 1)
        if rows is None or tokens is None or slices - singles > CHUNKS:
            return None
        return _mixed_shape(rows, tokens)

    def capture_all(self, picking: Picking) -> None:
        """The largest first: the smaller ones find room in the memory that it left."""
        for shape in self.shapes():
            self._graph(shape, picking)

    def run(self, packed: Tensor, shape: Shape, picking: Picking, top: int = 0) -> Picked:
        """Queue a batch that was packed to a graph's shape -> its rows' tokens, good until the next run.

        What is rarely asked for is picked outside of the graph, from the logits that it leaves: every combination
        would want graphs of its own, and captures in mid-run, to save a dozen launches beside the model's hundreds.
        """
        replay = self._graph(shape, None if picking.rare else picking)
        own = self._packed[: len(packed)]
        own.copy_(packed)
        result = replay()
        return self._forward.pick(result, own, shape, picking, top) if picking.rare else Picked(result)

    def _graph(self, shape: Shape, picking: Picking | None) -> Work:
        """The captured step that picks so, or else leaves logits."""
        if (shape, picking) not in self._captured:
            packed = self._packed[: sum(shape.sizes)]
            # Capturing runs the work, too: for nobody, since other rows' blocks may belong to others by now.
            packed.copy_(idle(shape, self._scratch))
            work = self._leaving_logits(packed, shape) if picking is None else self._picking(packed, shape, picking)
            self._captured[shape, picking] = self._timeline.capture(work)
        return self._captured[shape, picking]

    def _picking(self, packed: Tensor, shape: Shape, picking: Picking) -> Work:
        return lambda: self._forward(packed, shape, picking).ids

    def _leaving_logits(self, packed: Tensor, shape: Shape) -> Work:
        """Copied out of the graph's own memory, which other captures may use once this one is over."""

        def work() -> Tensor:
            logits = self._forward.logits(packed, shape)
            if self._logits is None:  # never while capturing, since work is run before
                self._logits = logits.new_empty(max(shape.wanted for shape in self.shapes()), logits.shape[1])
            return self._logits[: len(logits)].copy_(logits)

        return work


def idle(shape: Shape, scratch: int) -> Tensor:
    """A packed batch that is all padding."""
    if shape.rows is None:
        fills = [scratch, 0]
    else:
        fills = [scratch, -1, scratch, 0, shape.decodes, shape.decodes + shape.tokens - 1]
    return torch.cat([torch.full((size,), fill) for size, fill in zip(shape.sizes, fills, strict=True)])


def _mixed_shape(decodes: int, tokens: int) -> Shape:
    return Shape(decodes, tokens, CHUNKS, decodes + CHUNKS)


def _next(sizes: Sequence[int], count: int) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
