"""Orders that are fair to tenants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from playground.draft import Draft
from playground.sequence import Sequence, State
from policies.ranking import Ranking


@dataclass(slots=True)
class Account:
    """What one tenant was given: tokens, and what it was lifted by when it came back from being idle."""

    prompts: int = 0
    outputs: int = 0
    lift: float = 0.0


@dataclass(slots=True)
class Charged:
    """A sequence that was admitted, and how many of its output tokens its tenant was charged for."""

    sequence: Sequence
    outputs: int = 0


@dataclass(slots=True)
class Books:
    """The accounts of one rank."""

    accounts: dict[str, Account] = field(default_factory=dict)
    waiting: Ranking = field(default_factory=Ranking)
    offered: list[Sequence] = field(default_factory=list)
    """Who was next; charged for its prompt if it turns out to have been admitted."""
    charged: dict[int, Charged] = field(default_factory=dict)
    last: str | None = None
    """Whose request left the queue last."""


@dataclass(frozen=True, slots=True)
class Vtc:
    """Virtual token counters: next is the first request of the tenant that was given least.

    A tenant's counter rises by `prompt_weight` for each token of a prompt when it is admitted, and by `output_weight`
    for each token that comes out. Who comes back with nothing waiting is lifted to the least counter of those that have
    something waiting (of the last that had, if nobody has): being idle saves nothing up. Stops at the first that is not
    admitted. With nobody preempted, what two tenants are given while both have requests waiting differs by at most
    2 max(prompt_weight * longest prompt, output_weight * tokens that a batch holds) (Theorem 4.4).
    Accounts are kept for each rank apart. A preempted request comes before others of its tenant, and pays neither for
    its prompt nor for its old tokens again.
    Source: Sheng et al., OSDI'24 (arXiv 2401.00588), Algorithm 2 with its weights 1 and 2, from memory.
    """

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    _ranks: dict[int, Books] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("prompt_weight", "output_weight"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"policy.order.{name}={getattr(self, name)} must be 0 or more")

    def __call__(self, draft: Draft) -> Iterator[Sequence]:
        books = self._ranks.setdefault(draft.rank, Books())
        _charge_prompts(books)
        newcomers = books.waiting.refresh(draft.waiting)
        if newcomers or draft.seats > 0:
            _charge_outputs(books)
        for sequence in newcomers:
            self._queue(books, sequence)
        passed: Sequence | None = None
        while (head := self._next(books)) is not None and head is not passed:
            books.offered.append(head)
            yield head
            _charge_prompts(books)
            passed = head

    def counter(self, tenant: str, rank: int = 0) -> float:
        """Weighted tokens that a tenant was given, and lifted by, as of the last look."""
        books = self._ranks.get(rank, Books())
        return self._counter(books.accounts.get(tenant, Account()))

    def _counter(self, account: Account) -> float:
        return self.prompt_weight * account.prompts + self.output_weight * account.outputs + account.lift

    def _next(self, books: Books) -> Sequence | None:
        heads = books.waiting.heads
        if not heads:
            return None
        return heads[min(heads, key=lambda tenant: (self._counter(books.accounts[tenant]), tenant))]

    def _queue(self, books: Books, sequence: Sequence) -> None:
        tenant, returns = sequence.request.tenant, sequence.admitted is not None
        account = books.accounts.setdefault(tenant, Account())
        if not returns and books.waiting.head(tenant) is None:
            account.lift += max(self._floor(books) - self._counter(account), 0.0)
        books.waiting.put(sequence, (not returns, sequence.request.arrival), tenant)

    def _floor(self, books: Books) -> float:
        """Where a tenant that comes back begins."""
        accounts = books.accounts
        active = [self._counter(accounts[tenant]) for tenant in books.waiting.heads]
        if not active and books.last is not None:
            active = [self._counter(accounts[books.last])]
        return min(active, default=0.0)


def _charge_prompts(books: Books) -> None:
    for sequence in books.offered:
        waits = sequence.admitted is None or sequence.state in (State.WAITING, State.SWAPPED)
        if waits or sequence.id in books.charged:
            continue
        books.charged[sequence.id] = Charged(sequence)
        books.last = sequence.request.tenant
        books.accounts[sequence.request.tenant].prompts += sequence.request.prompt_length
    books.offered.clear()


def _charge_outputs(books: Books) -> None:
    """For what was promised since; who ended is charged for what it got, and forgotten."""
    ended = []
    for id, charged in books.charged.items():
        sequence = charged.sequence
        over = sequence.state is State.ENDED
        outputs = sequence.returned if over else sequence.promised
        if outputs != charged.outputs:
            books.accounts[sequence.request.tenant].outputs += outputs - charged.outputs
            charged.outputs = outputs
        if over:
            ended.append(id)
    for id in ended:
        del books.charged[id]
