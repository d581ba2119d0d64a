"""A step on its way to the device: how its batch is packed, at once or in two halves that compute by turns.

Where replicas share experts a rank has to take part without a batch of its own, too: it computes a row for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.cuda.forward import Shape, Turns, least_shape, pack, spans
from engine.cuda.graphs import Graphs
from engine.cuda.residents import Batch, Rows, Sampled
from engine.cuda.state import Words
from engine.overlap import Overlap
from engine.pooled import Passes
from kernels.batch import Span
from playground.halves import cut


class Packed(NamedTuple):
    """Numbers in a row, and what is known of them."""

    numbers: Words
    shape: Shape | Turns
    sampled: Sampled
    """Whose tokens the wanted rows are, in order."""
    known: Sequence[Sequence[Span]]
    """Spans of each pass."""
    graph: Shape | None = None
    """The shape if it is one of a graph's."""


def packed(batch: Batch, graphs: Graphs | None, overlap: Overlap, scratch: int) -> Packed:
    """As a graph takes it if there is one; where prompts are to be halved there is none.

    Of nothing but decodes graphs compute halves themselves: their rows are alike.
    """
    tokens = int(batch.lengths.sum())
    if not batch.nothing_but_decodes and overlap.halves(tokens) and (both := halves(batch, overlap.threshold)):
        return _by_turns(both, scratch)
    graph = None if graphs is None else graphs.shape(batch)
    return _packed_one(batch, graph or least_shape(batch), scratch)._replace(graph=graph)


def packed_together(batch: Batch, graphs: Graphs | None, threshold: float, scratch: int, pooled: Passes) -> Packed:
    """A batch, which may be empty, beside those of other replicas, which know as much of this one: see `Pooled`.

    Small steps are padded to a graph's size on all ranks, whether or not a rank's own has prompts and no graph.
    """
    if len(pooled) == 1:
        decodes = None if graphs is None else graphs.pooled(max(pooled[0]))
        if decodes is not None and batch.nothing_but_decodes:
            return _packed_one(batch, decodes, scratch)._replace(graph=decodes)
        return _packed_one(batch, _pooling(batch, pooled[0] if decodes is None else decodes.pooled), scratch)
    both = zip(parted(batch, threshold), pooled, strict=True)
    return _behind(*[_packed_one(half, _pooling(half, rows), scratch) for half, rows in both])


def _pooling(batch: Batch, pooled: tuple[int, ...]) -> Shape:
    """Somebody has to be there for others' tokens: a row for nobody."""
    return (least_shape(batch) if len(batch.starts) else Shape(1))._replace(pooled=pooled)


def _packed_one(batch: Batch, shape: Shape, scratch: int) -> Packed:
    numbers, sampled = pack(batch, shape, scratch)
    return Packed(numbers, shape, sampled, (spans(batch, shape),))


def _behind(first: Packed, second: Packed) -> Packed:
    assert isinstance(first.shape, Shape) and isinstance(second.shape, Shape)
    return Packed(
        np.concatenate((first.numbers, second.numbers)),
        Turns(first.shape, second.shape),
        Sampled(first.sampled.residents + second.sampled.residents, first.sampled.positions + second.sampled.positions),
        (*first.known, *second.known),
    )


def _by_turns(both: tuple[Batch, Batch], scratch: int) -> Packed:
    return _behind(*[_packed_one(half, least_shape(half), scratch) for half in both])


def halves(batch: Batch, threshold: float) -> tuple[Batch, Batch] | None:
    """The two batches that `engine.overlap.halved` makes of the same slices; None if one were empty."""
    first, second = parted(batch, threshold)
    return (first, second) if len(first.starts) and len(second.starts) else None


def parted(batch: Batch, threshold: float) -> tuple[Batch, Batch]:
    """The same; one may be empty."""
    prompts, rows = np.flatnonzero(batch.lengths != 1), np.flatnonzero(batch.lengths == 1)
    place = cut(batch.lengths[prompts].tolist(), len(rows), threshold)
    early = np.concatenate((prompts[: place.prompts + (place.inside > 0)], rows[: place.rows]))
    late = np.concatenate((prompts[place.prompts :], rows[place.rows :]))
    first, second = _part(batch, early), _part(batch, late)
    if place.inside:
        first.lengths[place.prompts], first.samples[place.prompts] = place.inside, False
        second.starts[0] += place.inside
        second.lengths[0] -= place.inside
    return _counted(first), _counted(second)


def _part(batch: Batch, chosen: Words) -> Batch:
    rows = Rows.of([batch.rows.residents[index] for index in chosen])
    return Batch(rows, batch.starts[chosen], batch.lengths[chosen], batch.samples[chosen], 0)


def _counted(batch: Batch) -> Batch:
    return batch._replace(singles=int(np.count_nonzero(batch.lengths == 1)))
