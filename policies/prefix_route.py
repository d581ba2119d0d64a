"""Which replica serves a new request, where prompts begin alike?

A router knows no replica's cache: it remembers which prefixes it sent where. That a replica has dropped them since, or
never cached them, it does not see.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from playground.core import RequestView
from playground.policy import ClusterView
from policies.dispatched import Dispatched, Turns
from policies.route import outstanding


class Prefixes:
    """The blocks of prompts that were sent to each replica: an approximate radix tree of its cache.

    The keys of blocks are chained, so each names a whole prefix, and a set of them is a tree. Of each replica the
    `most` that were used last are kept; a prefix was always used after what follows it, so that leaves go first.
    """

    __slots__ = ("_known", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, OrderedDict[Hashable, None]] = {}

    def size(self, rank: int) -> int:
        """Blocks that are known of a replica."""
        return len(self._known.get(rank, ()))

    def matched(self, rank: int, keys: Sequence[Hashable]) -> int:
        """How many of these blocks, from the first one on, a replica is taken to have."""
        if (known := self._known.get(rank)) is None:
            return 0
        return next((place for place, key in enumerate(keys) if key not in known), len(keys))

    def add(self, rank: int, keys: Sequence[Hashable]) -> None:
        """A prompt with these blocks was sent there."""
        known = self._known.setdefault(rank, OrderedDict())
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The replica with the longest known prefix of the prompt, unless it is short or the load uneven.

    With unfinished requests as loads: if max - min > `balance_abs` and max > `balance_rel` min, the least loaded. Else,
    if the longest match is more than `cache_threshold` of the prompt, the replica that has it; else the one whose tree
    is the smallest. Among equals the one chosen longest ago. Trees keep `tree_blocks` blocks of each replica. `own`:
    see `least_outstanding`; SGLang's router counts for itself, so its loads are never old.
    Source: SGLang router (`cache_aware.rs` at 026f853), with the defaults of the later gateway; at first they were 0.5,
    32, 1.0001. It matches characters and trims its trees once a minute; here blocks are matched, and trimmed at once.
    """

    cache_threshold: float = 0.3
    balance_abs: float = 64
    balance_rel: float = 1.5
    tree_blocks: int = 1 << 20
    own: bool = True
    _prefixes: Prefixes = field(init=False, repr=False, compare=False)
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ValueError(f"policy.route.cache_threshold={self.cache_threshold} must lie in [0, 1]")
        if not self.balance_abs >= 0:
            raise ValueError(f"policy.route.balance_abs={self.balance_abs} must be 0 or more requests")
        if not self.balance_rel >= 1:
            raise ValueError(f"policy.route.balance_rel={self.balance_rel} must be at least 1")
        _check_blocks(self.tree_blocks)
        object.__setattr__(self, "_prefixes", Prefixes(self.tree_blocks))

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        loads, keys, prefixes = self._dispatched.loads(view), view.prefix(), self._prefixes
        matched = {load.rank: prefixes.matched(load.rank, keys) for load in loads}
        counts = list(map(outstanding, loads))
        least, most = min(counts), max(counts)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            chosen = self._turns.least(loads, outstanding)
        elif max(matched.values()) * view.block_size > self.cache_threshold * request.prompt_length:
            chosen = self._turns.least(loads, lambda load: -matched[load.rank])
        else:
            chosen = self._turns.least(loads, lambda load: prefixes.size(load.rank))
        prefixes.add(chosen, keys)
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen


class Window:
    """Costs of the last `seconds`, by rank."""

    __slots__ = ("_costs", "_seconds", "_sums")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._costs: deque[tuple[float, int, float]] = deque()
        self._sums: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._costs)

    def add(self, now: float, rank: int, cost: float) -> None:
        self._costs.append((now, rank, cost))
        self._sums[rank] = self._sums.get(rank, 0.0) + cost

    def sum(self, rank: int) -> float:
        return self._sums.get(rank, 0.0)

    def passing(self, now: float) -> None:
        """Forget what is too long ago."""
        while self._costs and self._costs[0][0] <= now - self._seconds:
            _, rank, cost = self._costs.popleft()
            self._sums[rank] -= cost


@dataclass(frozen=True, slots=True)
class Preble:
    """Exploit where the known prefix is longer than the rest of the prompt, else explore by load (Preble, ICLR'25).

    Exploiting: the replica with the longest match, the least loaded of those. Exploring: the least sum of load and
    missed prompt tokens. The load of a replica is what was sent there in the last `window` seconds: missed prompt
    tokens + `answer` each. Who would exploit explores nevertheless where the replica's load is more than `skew` times
    the least, once there were `warm_up` requests a replica in the window. Among equals the one chosen longest ago. It
    looks at no reports: their age changes nothing. Trees keep `tree_blocks` blocks of each replica.
    Source: arXiv 2407.00023 (E2 scheduling, 3 minutes), from its abstract and its authors' scheduler
    (`global_scheduler_with_time.py`: skew 1.5, 50 requests; as ported in DualMap). Costs are tokens, where it has
    regressions to seconds and the answers observed. Not taken over: the cost of evictions, prefixes that are moved or
    doubled as a whole (here single requests stray), and its local scheduler.
    """

    window: float = 180.0
    answer: float = 45.0
    skew: float = 1.5
    warm_up: int = 50
    tree_blocks: int = 1 << 20
    _prefixes: Prefixes = field(init=False, repr=False, compare=False)
    _recent: Window = field(init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.window > 0:
            raise ValueError(f"policy.route.window={self.window} must be more than 0 seconds")
        if not self.answer >= 0:
            raise ValueError(f"policy.route.answer={self.answer} must be 0 or more tokens")
        if not self.skew >= 1:
            raise ValueError(f"policy.route.skew={self.skew} must be at least 1 (inf: exploit whatever the load)")
        if self.warm_up < 0:
            raise ValueError(f"policy.route.warm_up={self.warm_up} must be 0 or more requests a replica")
        _check_blocks(self.tree_blocks)
        object.__setattr__(self, "_prefixes", Prefixes(self.tree_blocks))
        object.__setattr__(self, "_recent", Window(self.window))

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        recent, keys = self._recent, view.prefix()
        recent.passing(view.now)
        known = {load.rank: self._prefixes.matched(load.rank, keys) * view.block_size for load in view.loads}
        missed = {rank: max(request.prompt_length - tokens, 0) for rank, tokens in known.items()}
        best = min(missed, key=lambda rank: (missed[rank], recent.sum(rank)))
        if known[best] > missed[best] and not self._strained(best, len(known)):
            chosen = self._turns.least(view.loads, lambda load: (missed[load.rank], recent.sum(load.rank)))
        else:
            chosen = self._turns.least(view.loads, lambda load: recent.sum(load.rank) + missed[load.rank])
        recent.add(view.now, chosen, missed[chosen] + self.answer)
        self._prefixes.add(chosen, keys)
        return chosen

    def _strained(self, rank: int, ranks: int) -> bool:
        least = min(map(self._recent.sum, range(ranks)))
        return len(self._recent) >= self.warm_up * ranks and self._recent.sum(rank) > self.skew * least


def _check_blocks(value: int) -> None:
    if value < 1:
        raise ValueError(f"policy.route.tree_blocks={value} must be at least 1")
