"""A step on its way to the device: how its batch is packed, at once or in two halves that compute by turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.cuda.forward import Shape, Turns, least_shape, pack, spans
from engine.cuda.graphs import Graphs
from engine.cuda.residents import Batch, Rows, Sampled
from engine.cuda.state import Words
from engine.overlap import Overlap
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
    shape = graph or least_shape(batch)
    numbers, sampled = pack(batch, shape, scratch)
    return Packed(numbers, shape, sampled, (spans(batch, shape),), graph)


def _by_turns(both: tuple[Batch, Batch], scratch: int) -> Packed:
    shape = Turns(*map(least_shape, both))
    (first, early), (second, late) = (pack(half, one, scratch) for half, one in zip(both, shape, strict=True))
    sampled = Sampled(early.residents + late.residents, early.positions + late.positions)
    known = [spans(half, one) for half, one in zip(both, shape, strict=True)]
    return Packed(np.concatenate((first, second)), shape, sampled, known)


def halves(batch: Batch, threshold: float) -> tuple[Batch, Batch] | None:
    """The two batches that `engine.overlap.halved` makes of the same slices; None if one were empty."""
    prompts, rows = np.flatnonzero(batch.lengths != 1), np.flatnonzero(batch.lengths == 1)
    place = cut(batch.lengths[prompts].tolist(), len(rows), threshold)
    early = np.concatenate((prompts[: place.prompts + (place.inside > 0)], rows[: place.rows]))
    late = np.concatenate((prompts[place.prompts :], rows[place.rows :]))
    if not len(early) or not len(late):
        return None
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
