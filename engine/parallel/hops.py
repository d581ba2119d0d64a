"""In which order layers cross from stage to stage, one by one, so that each stage has room for them. No tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.errors import EngineError


class Hop(NamedTuple):
    """A layer crosses to the next stage or to the one before: the last one of its stage, or the first."""

    source: int
    target: int

    @property
    def onward(self) -> bool:
        return self.target > self.source


def hops(before: Sequence[int], after: Sequence[int], room: Sequence[int]) -> list[Hop]:
    """From so many layers on each stage to so many; `room`: the most that each can ever hold, on the way, too.

    There always is such an order. A stage that is full and is to take has to give as well, and in the same direction,
    since every boundary moves one way; the last one in that direction cannot be full, for what it ends with fits.
    """
    _check(before, after, room)
    held, made = list(before), []
    back = [new - old for old, new in zip(accumulate(before), accumulate(after), strict=True)][:-1]
    """Layers that are still to cross each boundary towards the first stage; negative: towards the last."""
    while any(back):
        edge, hop = next(
            (edge, hop)
            for edge, count in enumerate(back)
            if count and held[(hop := _across(edge, count)).source] and held[hop.target] < room[hop.target]
        )
        held[hop.source] -= 1
        held[hop.target] += 1
        back[edge] += 1 if hop.onward else -1
        made.append(hop)
    return made


def _across(edge: int, back: int) -> Hop:
    return Hop(edge + 1, edge) if back > 0 else Hop(edge, edge + 1)


def _check(before: Sequence[int], after: Sequence[int], room: Sequence[int]) -> None:
    asked = f"a step's move to layers={list(after)}"
    if len(after) != len(before) or sum(after) != sum(before):
        raise EngineError(f"{asked}: {len(before)} stages hold {sum(before)} layers; deal out those")
    if min(after) < 1:
        raise EngineError(f"{asked} leaves stage {after.index(min(after))} without layers; leave it one at least")
    for stage, (count, most) in enumerate(zip(after, room, strict=True)):
        if count > most:
            raise EngineError(f"{asked}: stage {stage} has room for {most}; raise parallel.spare_layers, or move fewer")
