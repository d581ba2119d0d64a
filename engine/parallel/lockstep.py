"""Steps of replicas that go together (DP attention): what each of them is told of a step that all take part in."""

from __future__ import annotations

from collections import Counter
from itertools import compress

from engine.pooled import Pooled
from playground.core import COPY_IN, COPY_OUT, Columns, Step


def pooled(step: Step, replicas: int) -> Pooled:
    """Tokens of each replica, by lane in order; copies are nobody else's concern, but come back from all."""
    tokens: dict[str, Counter[int]] = {lane: Counter() for lane in step.lanes}
    part = step.columns
    for lane, rank, length in zip(part.lane, part.rank, part.length, strict=True):
        tokens[lane][rank] += length
    return {
        lane: () if lane in (COPY_IN, COPY_OUT) else tuple([count[rank] for rank in range(replicas)])
        for lane, count in tokens.items()
    }


def share(step: Step, rank: int) -> Step:
    """A step without the slices, copies and new requests of other ranks. Of who ends, everybody hears."""
    mine = [owner == rank for owner in step.columns.rank]
    columns = Columns._make([tuple(compress(column, mine)) for column in step.columns])
    copies = tuple([copy for copy in step.copies if copy.rank == rank])
    named = {*columns.sequence, *[copy.sequence for copy in copies]}
    starts = tuple([request for request in step.starts if request.id in named])
    return Step(step.id, step.group, step.planned, columns, copies, starts, step.ends, move=step.move)
