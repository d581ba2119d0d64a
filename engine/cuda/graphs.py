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
        replicas: int = 1,
    ) -> None:
        """`replicas` bring as many rows each to the experts; where there are several, graphs hold decodes only."""
        self._forward = forward
        self._replicas = replicas
        self._scratch = scratch
        self._timeline = timeline
        self._decodes = decode_sizes(most)
        self._mixed = mixed_sizes(most)
        self._tokens = tuple(tokens)
        largest = max(sum(shape.sizes) for shape in self.shapes())
        self._packed = torch.zeros(largest, dtype=torch.int64, device=timeline.device)
        """Where all graphs read their batch: one runs at a time."""
        self._captured: dict[tuple[Shape, Picking | None], Work] = {}
        self._found: Tensor | None = None
        """Where graphs that do not pick leave logits or hidden states: one for all, made when somebody needs it."""

    def __len__(self) -> int:
        return len(self._captured)

    def shapes(self) -> Iterator[Shape]:
        """All that can be captured, the largest of each kind first."""
        if self._replicas > 1:
            yield from (self._pooled_shape(decodes) for decodes in reversed(self._decodes))
            return
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

    def pooled(self, rows: int) -> Shape | None:
        """The shape in which all replicas decode if the one that has most brings so many rows; None: too many."""
        size = _next(self._decodes, rows)
        return None if size is None else self._pooled_shape(size)

    def _pooled_shape(self, decodes: int) -> Shape:
        return Shape(decodes, pooled=(decodes,) * self._replicas)

    def capture_all(self, picking: Picking) -> None:
        """The largest first: the smaller ones find room in the memory that it left."""
        for shape in self.shapes():
            self.capture(shape, picking)

    def capture(self, shape: Shape, picking: Picking) -> None:
        """Have what `run` will want, before anything of its step is queued: capturing runs the work, too."""
        self._graph(shape, self._inside(picking))

    def run(self, packed: Tensor, shape: Shape, picking: Picking, top: int = 0) -> Picked | Tensor:
        """Queue a batch that was packed to a graph's shape -> as `Forward` gives it, good until the next run.

        What is rarely asked for is picked outside of the graph, from the logits that it leaves: every combination
        would want graphs of its own, and captures in mid-run, to save a dozen launches beside the model's hundreds.
        """
        inside = self._inside(picking)
        replay = self._graph(shape, inside)
        own = self._packed[: len(packed)]
        own.copy_(packed)
        found = replay()
        return self._forward.ended(found, own, shape, picking, top) if inside is None else Picked(found)

    def _inside(self, picking: Picking) -> Picking | None:
        """How the graph itself picks; None: it does not.

        With other replicas it never does: captures exchange, and not all of these will want the same one at once.
        """
        return picking if self._forward.picks and not picking.rare and self._replicas == 1 else None

    def _graph(self, shape: Shape, picking: Picking | None) -> Work:
        """The captured step that picks so, or else leaves what its body found."""
        if (shape, picking) not in self._captured:
            packed = self._packed[: sum(shape.sizes)]
            # Capturing runs the work, too: for nobody, since other rows' blocks may belong to others by now.
            with self._timeline.computing():  # steps before may yet have to read their batch
                packed.copy_(idle(shape, self._scratch))
            work = self._leaving(packed, shape) if picking is None else self._picking(packed, shape, picking)
            self._captured[shape, picking] = self._timeline.capture(work)
        return self._captured[shape, picking]

    def _picking(self, packed: Tensor, shape: Shape, picking: Picking) -> Work:
        return lambda: self._forward.pick(self._forward.body(packed, shape), packed, shape, picking).ids

    def _leaving(self, packed: Tensor, shape: Shape) -> Work:
        """Copied out of the graph's own memory, which other captures may use once this one is over."""

        def work() -> Tensor:
            found = self._forward.body(packed, shape)
            if self._found is None:  # never while capturing, since work is run before
                rows = (shape.wanted if self._forward.picks else shape.all_tokens for shape in self.shapes())
                self._found = found.new_empty(max(rows), found.shape[1])
            return self._found[: len(found)].copy_(found)

        return work


def idle(shape: Shape, scratch: int) -> Tensor:
    """A packed batch that is all padding."""
    if shape.rows is None:
        fills = [scratch, 0]
    else:
        fills = [scratch, -1, scratch, 0, shape.decodes, shape.decodes + shape.tokens - 1]
    return torch.cat([torch.full((size,), fill) for size, fill in zip(shape.sizes, fills, strict=True)])


def largest_shape(most: int) -> Shape:
    """Of steps with at most so many decodes."""
    return _mixed_shape(mixed_sizes(most)[-1], PREFILL_SIZES[-1])


def _mixed_shape(decodes: int, tokens: int) -> Shape:
    return Shape(decodes, tokens, CHUNKS, decodes + CHUNKS)


def _next(sizes: Sequence[int], count: int) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
