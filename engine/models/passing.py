"""Forward passes that can wait: where one has begun an exchange with other ranks, another may compute meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

Pending = Callable[[], T]
"""What an exchange that is under way will bring; to be called once, before what it touches is used."""

Passing = Generator[None, None, Tensor]
"""A pass, or a part of one: it stops where exchanges are under way that something else might hide."""


def finished(passing: Passing) -> Tensor:
    """What a pass brings that nothing else is computed beside."""
    while True:
        try:
            next(passing)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def in_turns(first: Passing, second: Passing) -> tuple[Tensor, Tensor]:
    """What two passes bring of which each computes while the other exchanges."""
    brought: dict[int, Tensor] = {}
    passings = {0: first, 1: second}
    while passings:
        for place, passing in list(passings.items()):
            try:
                next(passing)
            except StopIteration as stop:
                brought[place] = stop.value
                del passings[place]
    return brought[0], brought[1]
