"""Steps of replicas that go together (DP attention): what each of them is told of a step that all take part in."""

from __future__ import annotations

from collections import Counter
from itertools import compress

from engine.overlap import NONE, Overlap, passes, tokens_of
from engine.pooled import Passes, Pooled
from playground.core import COPY_IN, COPY_OUT, Columns, Slice, Step


def pooled(step: Step, replicas: int, overlap: Overlap = NONE, multiple: int = 1) -> Pooled:
    """Tokens of each replica, by lane in order; copies are nobody else's concern, but come back from all.

    Where batches are halved, a rank cannot know how the others halve theirs. `multiple` above 1: so many rows of one
    token, or a multiple, a rank computes beside longer slices, some of them for nobody; and one row at least.
    """
    part = step.columns
    singles, longer = _counters(step), _counters(step)
    for lane, rank, length in zip(part.lane, part.rank, part.length, strict=True):
        (singles if length == 1 else longer)[lane][rank] += length
    found: dict[str, Passes] = {}
    for lane in step.lanes:
        few, many = ([count[lane][rank] for rank in range(replicas)] for count in (singles, longer))
        if lane in (COPY_IN, COPY_OUT):
            found[lane] = ()
        elif overlap.halves(max(map(sum, zip(few, many, strict=True)))):
            found[lane] = _halves(step, lane, replicas, overlap, multiple)
        else:
            found[lane] = (tuple(map(_rows, few, many, [multiple] * replicas)),)
    return found


def _counters(step: Step) -> dict[str, Counter[int]]:
    return {lane: Counter() for lane in step.lanes}


def _rows(singles: int, longer: int, multiple: int) -> int:
    rows = longer + (singles + -singles % multiple if longer else singles)
    return max(rows, 1) if multiple > 1 else rows


def _halves(step: Step, lane: str, replicas: int, overlap: Overlap, multiple: int) -> Passes:
    ranks: list[list[Slice]] = [[] for _ in range(replicas)]
    for part in step.slices:
        if part.lane == lane:
            ranks[part.rank].append(part)
    return tuple([tuple([_rows_of(slices, multiple) for slices in half]) for half in passes(ranks, overlap)])


def _rows_of(slices: list[Slice], multiple: int) -> int:
    singles = sum(part.length == 1 for part in slices)
    return _rows(singles, tokens_of(slices) - singles, multiple)


def share(step: Step, rank: int) -> Step:
    """A step without the slices, copies and new requests of other ranks. Of who ends, everybody hears."""
    mine = [owner == rank for owner in step.columns.rank]
    columns = Columns._make([tuple(compress(column, mine)) for column in step.columns])
    copies = tuple([copy for copy in step.copies if copy.rank == rank])
    named = {*columns.sequence, *[copy.sequence for copy in copies]}
    starts = tuple([request for request in step.starts if request.id in named])
    return Step(step.id, step.group, step.planned, columns, copies, starts, step.ends, move=step.move)
