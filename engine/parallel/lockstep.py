"""Steps of replicas that go together (DP attention): what each of them is told of a step that all take part in."""

from __future__ import annotations

from collections import Counter
from itertools import compress

from engine.overlap import NONE, Overlap, passes, tokens_of
from engine.pooled import Passes, Pooled
from playground.core import COPY_IN, COPY_OUT, Columns, Slice, Step


def pooled(step: Step, replicas: int, overlap: Overlap = NONE) -> Pooled:
    """Tokens of each replica, by lane in order; copies are nobody else's concern, but come back from all.

    Where batches are halved, a rank cannot know how the others halve theirs.
    """
    tokens: dict[str, Counter[int]] = {lane: Counter() for lane in step.lanes}
    part = step.columns
    for lane, rank, length in zip(part.lane, part.rank, part.length, strict=True):
        tokens[lane][rank] += length
    counts = {lane: tuple([count[rank] for rank in range(replicas)]) for lane, count in tokens.items()}
    return {
        lane: () if lane in (COPY_IN, COPY_OUT) else _halves(step, lane, count, overlap)
        for lane, count in counts.items()
    }


def _halves(step: Step, lane: str, count: tuple[int, ...], overlap: Overlap) -> Passes:
    if not overlap.halves(max(count)):
        return (count,)
    ranks: list[list[Slice]] = [[] for _ in count]
    for part in step.slices:
        if part.lane == lane:
            ranks[part.rank].append(part)
    return tuple([tuple(map(tokens_of, half)) for half in passes(ranks, overlap)])


def share(step: Step, rank: int) -> Step:
    """A step without the slices, copies and new requests of other ranks. Of who ends, everybody hears."""
    mine = [owner == rank for owner in step.columns.rank]
    columns = Columns._make([tuple(compress(column, mine)) for column in step.columns])
    copies = tuple([copy for copy in step.copies if copy.rank == rank])
    named = {*columns.sequence, *[copy.sequence for copy in copies]}
    starts = tuple([request for request in step.starts if request.id in named])
    return Step(step.id, step.group, step.planned, columns, copies, starts, step.ends, move=step.move)
