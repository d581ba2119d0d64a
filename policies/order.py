"""Who is next among the waiting?

Orders by a key that stands still while a sequence waits are here; `policies.preemptive` has those that take seats from
running sequences, `policies.fairness` and `policies.prefix` what is to be reckoned anew at every look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence
from policies.predictors import LogNormal, Predictor
from policies.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served; preempted sequences come before all others.

    Stops at the first that is not admitted: nobody overtakes (head-of-line blocking included).
    Source: vLLM (SOSP'23) and every engine since.
    """

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        served = None
        while (head := next(iter(draft.waiting), None)) is not None and head is not served:
            yield head
            served = head


Key = tuple[float, ...]


def by_key(ranks: dict[int, Ranking], key: Callable[[Sequence], Key], draft: Draft) -> Iterator[Sequence]:
    """The waiting sequences of the draft's rank, the smallest key first; equals by arrival in time, then by id."""
    ranking = ranks.setdefault(draft.rank, Ranking())
    for sequence in ranking.refresh(draft.waiting):
        ranking.put(sequence, (*key(sequence), sequence.request.arrival))
    yield from ranking.in_order()


@dataclass(frozen=True, slots=True)
class Sjf:
    """Shortest predicted job first: fewest tokens left to sample, by a predictor; ties by arrival.

    `predictor`: what the client allows, wrong by its `sigma`, `bias` and `seed` (log-normal), another of
    `policies.predictors`, or one of your own. A preempted sequence has fewer left than it had, and no other privilege.
    `ageing`: tokens of advantage for each second waited; with 0 a long request starves for as long as shorter ones keep
    coming. Nobody who runs is preempted, as in `srtf`. Source: SSJF (arXiv 2404.08509), Learning-to-Rank (NeurIPS'24),
    from their abstracts.
    """

    predictor: Predictor = field(default_factory=LogNormal)
    ageing: float = 0.0
    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ageing(self.ageing, "tokens")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        # All have aged for as long as the clock runs since: what tells them apart is when they came.
        request = sequence.request
        left = max(1.0, self.predictor(request) - sequence.promised)
        return (left + self.ageing * request.arrival,)


@dataclass(frozen=True, slots=True)
class Lof:
    """Longest output first: by what clients allow (`max_tokens`), the most first; ties by arrival.

    Long answers start early, so that a batch of known requests does not end with a few of them alone: for throughput
    offline. Under load short ones starve. Source: SGLang 00550cd, `lof` (`_sort_by_longest_output`).
    """

    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        return (-sequence.max_tokens,)


@dataclass(frozen=True, slots=True)
class Priority:
    """By the requests' priority, the lowest number first; ties by arrival.

    A preempted sequence goes back to its place among the waiting, not to the front. Whoever runs keeps its seat,
    however urgent those that wait (vllm-project/vllm #40004); `victims=priority` takes memory from the least urgent.
    `ageing`: priorities of advantage for each second waited (vLLM: 0, and the less urgent may starve).
    Source: vLLM v1, `policy="priority"` (`PriorityRequestQueue`, a heap of priority and arrival), from memory.
    """

    ageing: float = 0.0
    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ageing(self.ageing, "priorities")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority + self.ageing * sequence.request.arrival,)


@dataclass(frozen=True, slots=True)
class Edf:
    """Earliest deadline first, of the next token: arrival + `slo.ttft` + `slo.tpot` for each token that it has.

    What a request has no objective for is due never; those go by arrival, after all others. Late ones are not given up:
    under overload all become late (the domino effect), so combine it with an admission that rejects.
    Source: Liu and Layland, JACM 20(1), 1973; prefills by their TTFT deadline as in Niyama (ASPLOS'26).
    """

    _ranks: dict[int, Ranking] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        return by_key(self._ranks, self.key, draft)

    def key(self, sequence: Sequence) -> Key:
        slo = sequence.request.slo
        since = sequence.promised * slo.tpot if sequence.promised else 0.0  # of none, 0 times never is never
        return (sequence.request.arrival + slo.ttft + since,)


def check_ageing(ageing: float, unit: str) -> None:
    """Refuse an advantage that is negative or without bound."""
    if not 0 <= ageing < inf:
        raise ValueError(f"policy.order.ageing={ageing} must be 0 (none) or more {unit} a second")
