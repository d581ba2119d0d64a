"""What of a step's exchanges is hidden behind its computing, and how its slices are halved for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from playground.core import Slice
from playground.halves import cut

KINDS = ("none", "two_batch", "single_batch", "row_chunks")


@dataclass(frozen=True, slots=True)
class Overlap:
    """In steps of at least `rows` tokens (on the rank that has most).

    `two_batch`: each half of a batch exchanges while the other computes; a prompt is cut where whole ones would leave a
    side less than `threshold` of the tokens. `single_batch`: tokens travel to their experts while the shared experts
    compute. `row_chunks`: products before all-reduces are computed in `chunks` parts, each summed while the next is
    computed; experts are left whole.
    """

    kind: str = "none"
    rows: int = 0
    threshold: float = 0.48
    chunks: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EngineError(f"parallel.overlap={self.kind} must be one of {', '.join(KINDS)}")
        if self.rows < 0:
            raise EngineError(f"parallel.overlap_rows={self.rows} must be 0 or more tokens")
        if not 0 <= self.threshold <= 0.5:
            raise EngineError(f"parallel.overlap_threshold={self.threshold} must lie in [0, 0.5]; 0 cuts no prompt")
        if self.chunks < 2:
            raise EngineError(f"parallel.overlap_chunks={self.chunks} must be at least 2")

    def halves(self, tokens: int) -> bool:
        """Whether a step of so many tokens is computed in halves."""
        return self.kind == "two_batch" and self._enough(tokens)

    def hides_way(self, tokens: int) -> bool:
        """Whether shared experts are computed while so many tokens are on their way to the others."""
        return self.kind == "single_batch" and self._enough(tokens)

    def parts(self, tokens: int) -> int:
        """In how many chunks of rows a product before a sum is computed."""
        return min(self.chunks, tokens) if self.kind == "row_chunks" and self._enough(tokens) else 1

    def _enough(self, tokens: int) -> bool:
        return tokens >= max(2, self.rows)


NONE = Overlap()


def halved(slices: Iterable[Slice], threshold: float) -> tuple[list[Slice], list[Slice]]:
    """The two batches of one rank's slices: prompts first, then rows of one token, each in order. One may be empty.

    Of a prompt that is cut the later part sees the earlier one, whose KV each layer must have written before: see
    `engine.models.passing.in_turns`. It brings no blocks and alone samples.
    """
    slices = list(slices)
    prompts, rows = [part for part in slices if part.length != 1], [part for part in slices if part.length == 1]
    place = cut([part.length for part in prompts], len(rows), threshold)
    first, second = prompts[: place.prompts], prompts[place.prompts :]
    if place.inside:
        whole, inside = second[0], place.inside
        first.append(whole._replace(length=inside, samples=False, drafted=0))
        second[0] = whole._replace(start=whole.start + inside, length=whole.length - inside, blocks=())
    return first + rows[: place.rows], second + rows[place.rows :]


def tokens_of(slices: Iterable[Slice]) -> int:
    """That a batch computes."""
    return sum(part.length for part in slices)


def passes(ranks: Sequence[Sequence[Slice]], overlap: Overlap) -> list[list[list[Slice]]]:
    """What each rank of a group computes in a step, in one pass or in two: [passes][ranks] slices.

    The rank with most tokens decides for all, since all exchange with one another; without a second half there is
    nothing to take turns with.
    """
    whole = [list(slices) for slices in ranks]
    if not overlap.halves(max(tokens_of(slices) for slices in whole)):
        return [whole]
    halves = [list(half) for half in zip(*[halved(slices, overlap.threshold) for slices in whole], strict=True)]
    return halves if all(any(half) for half in halves) else [whole]
