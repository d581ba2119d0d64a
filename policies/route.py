"""Which replica serves a new request?

The loads that a route sees are as old as `queueing.report_interval`, `report_steps` and `report_delay` say, whatever
the route; without those they are the present ones. What routes do about their age is `own`: the router adds what it
placed since they were taken (`policies.dispatched`). It is on where the source has it (`vllm_dp`, `sglang_dp`,
`cache_aware`). Elsewhere it is off: the rule alone, which sends a burst between two reports to one replica, and so
fails `stale_loads` of the conformance kit; with `own` it passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from playground.core import RequestView
from playground.policy import ClusterView, Load
from policies.dispatched import Dispatched, Turns


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One after another, whatever their load. Source: gLLM bc91d98 (`llm_engine.py`), SGLang before `DPBudget`."""

    _turn: count[int] = field(default_factory=count, init=False, repr=False, compare=False)

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        return next(self._turn) % len(view.loads)


@dataclass(frozen=True, slots=True)
class LeastOutstanding:
    """The replica with the fewest unfinished requests (join the shortest queue).

    `waiting` and `running` weigh the two kinds of request. Loads are as old as `queueing.report_interval`,
    `report_steps` and `report_delay` say; with `own` the router adds what it placed since they were taken. Without, all
    that arrives between two reports goes to the replica that was the least loaded. `ties`: among equals the one chosen
    longest ago (`turns`), or always the first (`first`: vLLM before PR #47420, July 2026, whose rank 0 got six requests
    of ten).
    Source: `vllm_dp` is vLLM's internal balancer (4 waiting + running, reports every 0.1 s; since that PR its scan
    begins one further on after each decision); `sglang_dp` is SGLang's `DPBudget` by requests (PR #11469, October 2025:
    ranks are filled like water up to the level of the next, then in turns, which is what this comes to with `own`).
    """

    waiting: float = 1.0
    running: float = 1.0
    own: bool = False
    ties: str = "turns"
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ties not in ("turns", "first"):
            raise ValueError(f"policy.route.ties={self.ties} must be turns or first")

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        loads = self._dispatched.loads(view)
        if self.ties == "first":
            chosen = min(loads, key=lambda load: (self._score(load), load.rank)).rank
        else:
            chosen = self._turns.least(loads, self._score)
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen

    def _score(self, load: Load) -> float:
        return self.waiting * load.waiting + self.running * load.running


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The one with fewer unfinished requests of `choices` replicas drawn at random; among equals the first drawn.

    A herd that looks at the same stale loads does not all run to one replica. `choices=1` is random routing. `own`:
    see `least_outstanding`. Source: Mitzenmacher, "The power of two choices" (IEEE TPDS 12(10), 2001), from the
    abstract; SGLang's gateway has it as `power_of_two`.
    """

    choices: int = 2
    own: bool = False
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ValueError(f"policy.route.choices={self.choices} must be at least 1 (1: at random)")

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        loads = self._dispatched.loads(view)
        drawn = view.rng.sample(range(len(loads)), min(self.choices, len(loads)))
        chosen = min([loads[place] for place in drawn], key=outstanding).rank
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class LeastKv:
    """The replica with the fewest tokens of KV, held or asked for by prompts that wait there.

    Among equals the one with fewer unfinished requests, then the one chosen longest ago. `own`: see
    `least_outstanding`; a prompt that the loads do not know of counts with its tokens.
    Source: `sglang_dp_tokens` is SGLang's `DPBudget` by tokens with the optimistic update of PR #21699 (2026); without
    `own` it is what that PR mends: a burst goes to one rank.
    """

    own: bool = False
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        def score(load: Load) -> tuple[int, int]:
            return (load.blocks - load.blocks_free) * view.block_size + load.waiting_tokens, outstanding(load)

        chosen = self._turns.least(self._dispatched.loads(view), score)
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """All requests of a session go where its first one went, since their KV is there.

    First ones, and requests without a session, go to the replica with the fewest unfinished requests. A session moves
    there for good when its own replica has more than `ahead` requests more than that one (`inf`: never): sticky
    sessions pile up on few replicas (radixark/miles PR #2012). `sessions`: how many are remembered, the least recently
    used go first. `own`: see `least_outstanding`. Source: sticky sessions of gateways, vLLM's `session` router among
    them, from memory; `ahead` is ours.
    """

    ahead: float = inf
    sessions: int = 1 << 16
    own: bool = False
    _dispatched: Dispatched = field(default_factory=Dispatched, init=False, repr=False, compare=False)
    _turns: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)
    _homes: OrderedDict[str, int] = field(default_factory=OrderedDict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ahead >= 0:
            raise ValueError(f"policy.route.ahead={self.ahead} must be 0 or more requests (inf: sessions never move)")
        if self.sessions < 1:
            raise ValueError(f"policy.route.sessions={self.sessions} must be at least 1")

    def __call__(self, request: RequestView, view: ClusterView) -> int:
        loads = self._dispatched.loads(view)
        chosen = self._home(request.session, loads) if request.session else None
        if chosen is None:
            chosen = self._turns.least(loads, outstanding)
        else:
            self._turns.choose(chosen)
        if request.session:
            self._remember(request.session, chosen)
        if self.own:
            self._dispatched.add(view, request, chosen)
        return chosen

    def _home(self, session: str, loads: Sequence[Load]) -> int | None:
        home = self._homes.get(session)
        if home is None or self.ahead == inf:
            return home
        return home if outstanding(loads[home]) - min(map(outstanding, loads)) <= self.ahead else None

    def _remember(self, session: str, rank: int) -> None:
        self._homes[session] = rank
        self._homes.move_to_end(session)
        if len(self._homes) > self.sessions:
            self._homes.popitem(last=False)


def outstanding(load: Load) -> int:
    """Unfinished requests of a replica."""
    return load.waiting + load.running
