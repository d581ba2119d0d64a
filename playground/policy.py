"""The seam to scheduling ideas: what a policy answers, and what it is shown of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

from playground.core import RequestView, Spec

if TYPE_CHECKING:
    from playground.draft import Draft


class Load(NamedTuple):
    """One rank as it was when the view was taken: sequences, tokens and blocks."""

    rank: int
    waiting: int
    running: int
    waiting_tokens: int
    blocks_free: int
    blocks: int


class Loads(Sequence[Load]):
    """The loads of ranks as they are when somebody looks for the first time: many routers never do."""

    def __init__(self, look: Callable[[], Sequence[Load]], count: int) -> None:
        self._look = look
        self._count = count
        self._seen: Sequence[Load] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Load: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Load]: ...
    def __getitem__(self, place: int | slice) -> Load | Sequence[Load]:
        if self._seen is None:
            self._seen = self._look()
        return self._seen[place]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a router sees: the loads as stale as configured (`taken`: when they were), but the present time."""

    now: float
    taken: float
    loads: Sequence[Load]
    rng: Random
    prefix_hit: Callable[[int], int]
    """Tokens of this prompt that a rank has in its prefix cache, by rank."""
    fresh: bool = True
    """Whether the loads know of everything so far, the last placement included."""
    prefix: Callable[[], tuple[Hashable, ...]] = tuple
    """Chained keys of the prompt's full blocks, as far as its hashes are known: equal keys mean equal prefixes."""
    block_size: int = 16
    """Tokens of a block of KV."""


class Policy(Protocol):
    """One scheduling idea. Knows no clock, no device and no true output length."""

    def fill(self, draft: Draft) -> None:
        """Choose the tokens, victims and lanes of one step of one rank."""
        ...

    def place(self, request: RequestView, view: ClusterView) -> int | None:
        """The rank that gets a new request; None holds it until something changes."""
        ...

    def run_ahead(self, spec: Spec) -> int:
        """Steps outstanding per pipeline stage: 1 waits for every step, 2 plans one step ahead of its results."""
        ...

    def steady(self, draft: Draft) -> int:
        """For how many more steps `fill` would do the same if only decodes ticked; 0 promises nothing.

        Asked after `fill`, of the same draft.
        """
        ...
