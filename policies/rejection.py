"""Turning requests away when they arrive, rather than after they have waited and been computed in vain."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence
from policies.admission import FullPrompt
from policies.composed import Admission, tell_of_victims


@dataclass(slots=True)
class Arrivals:
    """Who has come to each rank since it was last asked."""

    _last: dict[int, tuple[float, set[int]]] = field(default_factory=dict)
    """The latest arrival seen, and who came then."""

    def since(self, draft: Draft) -> list[Sequence]:
        """New ones, in order of arrival."""
        last, then = self._last.get(draft.rank, (-1.0, set()))
        new: list[Sequence] = []
        for sequence in reversed(draft.waiting):  # type: ignore[call-overload]  # an ordered dictionary's values
            arrival = sequence.request.arrival
            if sequence.preemptions:  # comes back, wherever it queues
                continue
            if arrival < last or (arrival == last and sequence.id in then):
                break
            new.append(sequence)
        new.reverse()
        if new:
            latest = new[-1].request.arrival
            together = {sequence.id for sequence in new if sequence.request.arrival == latest}
            self._last[draft.rank] = latest, together | then if latest == last else together
        return new


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """Turned away on arrival if the rank would have more than `most` decodes by the time its prompt is computed.

    The prompt is computed in `prefill` seconds for each token of it and of all that queue before it; an answer takes
    `decode` seconds. So many decodes there will be then: those of now that began less than `decode` before then; of the
    prompts ahead, those that will not have ended (all, or decode / wait of them if the wait is longer than an answer);
    and it. `memory` decides when those that stay may start.
    Source: Mooncake, arXiv 2407.00079 (2024; FAST'25), early rejection based on prediction with a uniform answer time:
    the rule from a digest of the paper. There prefill and decode run on nodes of their own and loads are in units of
    what the objectives allow; here one rank does both, and the load is a number of decodes.
    """

    most: int = 128
    prefill: float = 2.7e-5
    decode: float = 5.0
    memory: Admission = FullPrompt()  # noqa: RUF009  (frozen)
    _arrivals: Arrivals = field(default_factory=Arrivals, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_most(self.most)
        if not self.prefill >= 0:
            raise ValueError(f"policy.admission.prefill={self.prefill} must be 0 or more seconds a token")
        if not self.decode > 0:
            raise ValueError(f"policy.admission.decode={self.decode} must be above 0 seconds an answer")

    def screen(self, draft: Draft) -> None:
        new = self._arrivals.since(draft)
        if not new:
            return
        tokens = draft.waiting_tokens - sum([sequence.remaining for sequence in new])
        prompts = [sequence for sequence in draft.running if not sequence.promised]
        tokens += sum([sequence.remaining for sequence in prompts])
        ahead = len(draft.waiting) - len(new) + len(prompts)
        ends = self._ends(draft)
        for sequence in new:
            wait = self.prefill * (tokens + sequence.remaining)
            if (load := self._load(ends, draft.now, wait, ahead)) > self.most:
                draft.reject(sequence, f"{load} decodes predicted {wait:.3g} s from now, when its prompt is computed")
            else:
                tokens, ahead = tokens + sequence.remaining, ahead + 1

    def load(self, draft: Draft, wait: float, ahead: int) -> int:
        """Decodes in `wait` seconds, with so many prompts ahead of one that begins to decode then; it included."""
        return self._load(self._ends(draft), draft.now, wait, ahead)

    def _load(self, ends: list[float], now: float, wait: float, ahead: int) -> int:
        staying = len(ends) - bisect_right(ends, now + wait)
        return staying + int(ahead * min(1.0, self.decode / wait) if wait else ahead) + 1

    def _ends(self, draft: Draft) -> list[float]:
        """When the decodes of now will end, in order; those whose first token has not come back, never."""
        firsts = [sequence.first_token for sequence in draft.running if sequence.promised]
        return sorted([inf if first is None else first + self.decode for first in firsts])

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        return self.memory(draft, sequence, tokens)

    def preempted(self, draft: Draft) -> None:
        tell_of_victims(self.memory, draft)


@dataclass(frozen=True, slots=True)
class LoadRejection:
    """Turned away on arrival if the rank has `most` decodes now, whatever is on its way: naive early rejection.

    Prompts that were let in count only once they are computed. Until then too many come in, and afterwards too few:
    load swings with a period of twice the wait for prefill, which `early_rejection` is there to damp. `memory` decides
    when those that stay may start. Source: Mooncake, arXiv 2407.00079 (2024; FAST'25), from a digest of the paper.
    """

    most: int = 128
    memory: Admission = FullPrompt()  # noqa: RUF009  (frozen)
    _arrivals: Arrivals = field(default_factory=Arrivals, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_most(self.most)

    def screen(self, draft: Draft) -> None:
        new = self._arrivals.since(draft)
        if not new:
            return
        load = sum([sequence.promised > 0 for sequence in draft.running])
        if load >= self.most:
            for sequence in new:
                draft.reject(sequence, f"{load} decodes now, at most {self.most} wanted")

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        return self.memory(draft, sequence, tokens)

    def preempted(self, draft: Draft) -> None:
        tell_of_victims(self.memory, draft)


def _check_most(most: int) -> None:
    if most < 1:
        raise ValueError(f"policy.admission.most={most} must be at least 1 decode")
