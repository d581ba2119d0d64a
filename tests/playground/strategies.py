"""What the laws are tried on: specs, workloads and compositions of policies, small enough to break often."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from playground.core import Request, Slo, Spec
from playground.draft import How
from playground.scheduler import Scheduler
from playground.sim.cost import Linear
from playground.workload.source import OpenLoop
from policies.admission import Always, FullPrompt, MaxLength, Watermark
from policies.align import Free, PrefillDelayer
from policies.balanced import BalancedDecode, SplitPd, TokenThrottling2026
from policies.budget import ChunkedPrefill, Orca, PrefillFirst, Static, TokenThrottling, TokenThrottling2025, Unified
from policies.composed import Composed
from policies.dynamic_chunks import DeadlineChunks, ProgressChunks
from policies.exact_fill import ExactFill
from policies.fairness import Vtc
from policies.future_peak import FuturePeak
from policies.inflight import InFlight
from policies.mlfq import SkipJoinMlfq
from policies.order import Edf, Fcfs, Lof, Priority, Sjf
from policies.overlap import Overlap
from policies.predictors import LogNormal, MaxTokens, RankNoise, Saturating
from policies.preemptive import PreemptivePriority, Srtf
from policies.prefill_first import ChunkedPrefillFirst
from policies.prefix import Hrrn, LongestPrefix, ShortestPrefill
from policies.prefix_route import CacheAware, Preble
from policies.qoe import QoeKnapsack
from policies.rejection import EarlyRejection, LoadRejection
from policies.reserve import DecodeReserve, NewTokenRatio
from policies.route import LeastKv, LeastOutstanding, PowerOfTwo, RoundRobin, SessionAffinity
from policies.slo import Credits, SloGuard
from policies.temporal import TemporalPhases
from policies.tpot_classes import TpotClasses
from policies.victims import Cheaper, Largest, LastArrived, LeastProgress, LeastRecompute, LowestPriority

ROUTES = {
    "round robin": RoundRobin,
    "least outstanding": LeastOutstanding,
    "least outstanding, own": partial(LeastOutstanding, own=True),
    "power of two": PowerOfTwo,
    "least KV": partial(LeastKv, own=True),
    "session": partial(SessionAffinity, ahead=1),
    "cache aware": partial(CacheAware, balance_abs=1, tree_blocks=20),
    "TPOT classes": partial(TpotClasses, (0.02, 0.1), step=0.01, per_decode=0.01),
    "Preble": partial(Preble, warm_up=1, window=0.1),
}


@dataclass(frozen=True)
class Composition:
    """Choices of a policy; `policy` makes a fresh one, since a route may count."""

    budget: Any
    admission: Any = Always()  # noqa: RUF009  (frozen)
    victims: Any = LastArrived()  # noqa: RUF009
    run_ahead: int = 1
    route: str = "round robin"
    delay: tuple[int, float] | None = None
    """Of prompts of ranks in lockstep, and the watermark."""
    order: Any = Fcfs()  # noqa: RUF009

    def policy(self) -> Composed:
        return Composed(
            deepcopy(self.budget),  # some count, some learn as they go
            order=deepcopy(self.order),
            admission=deepcopy(self.admission),
            victims=self.victims,
            route=ROUTES[self.route](),
            align=PrefillDelayer(*self.delay) if self.delay else Free(),
            overlap=Overlap(self.run_ahead),
        )


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on."""

    spec: Spec
    requests: tuple[Request, ...]
    composition: Composition
    aborts: tuple[tuple[float, int], ...] = ()
    cost: Linear = Linear(0.01)  # noqa: RUF009
    requeue: str = "front"
    prefix_cache: bool = True
    reports: tuple[float, int, float] = (0.0, 0, 0.0)
    """Interval, steps and delay of what a router is told."""

    def scheduler(self, policy: Any, seed: int = 0) -> Scheduler:
        return Scheduler(self.spec, policy, seed, self.prefix_cache, self.requeue, *self.reports)

    def source(self) -> OpenLoop:
        ordered = sorted(self.requests, key=lambda request: (request.arrival, request.id))
        return OpenLoop(ordered, self.aborts)

    def but(self, **changes: Any) -> Scenario:
        return replace(self, **changes)


# --- policies

TOKENS = st.sampled_from([1, 3, 8, 20, 64])
BATCH = st.integers(1, 5)
THROTTLES = dict(
    max_prefill=TOKENS,
    min_prefill=st.integers(1, 8),
    spread=st.integers(1, 8),
    kv_threshold=st.sampled_from([0.0, 0.05, 0.3]),
    wt=st.booleans(),
    ut=st.booleans(),
)
RESERVES = st.builds(DecodeReserve, init=st.sampled_from([0.0, 0.7]), fall=st.sampled_from([0.002, 0.1]))
BUDGETS = st.one_of(
    st.builds(Static, batch=BATCH),
    st.builds(Orca, batch=BATCH),
    st.builds(PrefillFirst, tokens=TOKENS),
    st.builds(
        Unified, tokens=TOKENS, long_prefill_threshold=st.sampled_from([0, 2, 10]), max_partial=st.integers(0, 2)
    ),
    st.builds(ChunkedPrefill, tokens=TOKENS),
    st.builds(InFlight, tokens=TOKENS, wait_steps=st.sampled_from([0, 2, 5]), wait_share=st.sampled_from([0.3, 1.0])),
    st.builds(TokenThrottling, **THROTTLES),
    st.builds(TokenThrottling2025, **THROTTLES),
    st.builds(ChunkedPrefillFirst, tokens=TOKENS, mixed=st.booleans()),
    st.builds(ExactFill, tokens=TOKENS),
    st.builds(BalancedDecode, tokens=TOKENS),
    st.builds(SplitPd, tokens=TOKENS, reserve=RESERVES),
    st.builds(TokenThrottling2026, TOKENS, st.integers(1, 8), st.integers(1, 8), RESERVES),
    st.builds(ProgressChunks, st.integers(1, 4), st.integers(4, 20), st.integers(1, 40), st.integers(1, 4)),
    st.builds(DeadlineChunks, sizes=st.just((2, 8, 20)), tight_sizes=st.just((2, 4)), tight=st.sampled_from([0, 1])),
    st.builds(Credits, tokens=TOKENS, least=st.sampled_from([0.1, 0.4, 1.0])),
    st.builds(
        QoeKnapsack,
        tokens=TOKENS,
        window=st.integers(1, 5),
        preemptions=st.integers(0, 2),
        per_decode=st.sampled_from([0.1, 0.01]),
        horizon=st.sampled_from([0.1, 2.0]),
        ttft=st.sampled_from([0.0, 0.1]),
    ),
    st.builds(
        TemporalPhases, batch=st.integers(1, 20), full=st.sampled_from([0.3, 1.0]), floor=st.sampled_from([1e-4, 1])
    ),
)
FRACTIONS = st.sampled_from([0.0, 0.01, 0.3])
ADMISSIONS = st.one_of(
    st.just(Always()),
    st.builds(Watermark, fraction=FRACTIONS),
    st.builds(FullPrompt, watermark=FRACTIONS),
    st.just(MaxLength()),
    st.builds(NewTokenRatio, decay_steps=st.sampled_from([1, 600]), clip=st.sampled_from([3, 4096])),
    st.builds(DecodeReserve, fall=st.sampled_from([0.002, 0.1])),
    st.builds(FuturePeak, predictor=st.sampled_from([MaxTokens(), LogNormal(sigma=1.0)])),
    st.builds(SloGuard, step=st.sampled_from([0.0, 0.01]), per_decode=st.sampled_from([0.001, 0.02])),
    st.builds(EarlyRejection, st.integers(1, 8), prefill=st.just(0.001), decode=st.sampled_from([0.05, 1.0])),
    st.builds(LoadRejection, st.integers(1, 8)),
)
MANNERS = [*How, Cheaper(bandwidth=2e10, copy=3e-5)]
RULES = [LastArrived, Largest, LeastProgress, LeastRecompute, LowestPriority]
VICTIMS = st.builds(lambda kind, how: kind(how), st.sampled_from(RULES), st.sampled_from(MANNERS))
PREDICTORS = st.sampled_from([MaxTokens(), LogNormal(sigma=1.0), RankNoise(0.5, 20), Saturating(5.0)])
ORDERS = st.one_of(
    st.just(Fcfs()),
    st.builds(Sjf, PREDICTORS, st.sampled_from([0.0, 30.0])),
    st.sampled_from(
        [
            Lof(),
            Priority(),
            Priority(ageing=50.0),
            Edf(),
            Vtc(),
            LongestPrefix(2),
            Hrrn(),
            LongestPrefix(),
            ShortestPrefill(),
            ShortestPrefill(50.0, 2),
        ]
    ),
    st.builds(Srtf, PREDICTORS, st.sampled_from([0.0, 4.0])),
    st.builds(PreemptivePriority, st.sampled_from([0, 3]), st.booleans()),
    st.builds(SkipJoinMlfq, prefill_tokens=st.sampled_from([1, 8]), starve_limit=st.sampled_from([0.05, 1.0])),
)
DELAYS = st.one_of(st.none(), st.tuples(st.sampled_from([1, 2, 5, 30]), st.sampled_from([0.0, 0.3])))
COMPOSITIONS = st.builds(
    Composition,
    BUDGETS,
    ADMISSIONS,
    VICTIMS,
    st.integers(1, 3),
    st.sampled_from(sorted(ROUTES)),
    order=ORDERS,
)

# --- devices


@st.composite
def specs(draw, **fixed: Any) -> Spec:
    block_size = draw(st.sampled_from([1, 4, 16]))
    options = dict(
        blocks=draw(st.integers(2, max(64 // block_size, 8))),
        block_size=block_size,
        host_blocks=draw(st.sampled_from([0, 3, 200])),
        max_seqs=draw(st.sampled_from([64, 64, 4, 2, 1])),
        max_tokens=draw(st.sampled_from([64, 16, 4])),
        stages=draw(st.integers(1, 4)),
        ranks=draw(st.sampled_from([1, 1, 2, 3])),
        lockstep=draw(st.booleans()),
        forwards_tokens=draw(st.booleans()),
    )
    return Spec(**(options | fixed))


COSTS = st.builds(
    Linear,
    base=st.sampled_from([0.01, 0.02]),
    per_token=st.sampled_from([0.0, 0.001]),
    per_context=st.sampled_from([0.0, 0.0001]),
    host_base=st.sampled_from([0.0, 0.003]),
    host_per_sequence=st.sampled_from([0.0, 0.0005]),
    per_transfer=st.sampled_from([0.0, 0.002]),
    per_block=st.sampled_from([0.0, 0.004]),
)

# --- workloads

PRIORITIES, TENANTS = st.sampled_from([0, 0, 1, 5]), st.sampled_from(["", "a", "b"])
SLOS = st.sampled_from([Slo(), Slo(0.05, 0.02), Slo(tpot=0.03)])
TIMES = st.one_of(st.just(0.0), st.integers(0, 10).map(lambda tick: tick / 100), st.floats(0, 0.2))


def hashes(family: int, shared: int, owner: int, prompt_length: int, hash_block: int) -> tuple[int, ...]:
    """Ids of a prompt that begins like its family's for `shared` tokens and goes on alone."""
    chunks = range(-(-prompt_length // hash_block))
    return tuple((family if (i + 1) * hash_block <= shared else 100 + owner) * 1000 + i for i in chunks)


@st.composite
def requests(draw, id: int, spec: Spec, arrival: float) -> Request:
    capacity = spec.blocks * spec.block_size
    small, huge = st.integers(1, max(capacity // 3, 1)), st.integers(max(capacity // 2, 1), capacity)
    prompt_length = draw(st.one_of(small, small, small, huge))
    fitting = capacity - prompt_length + 1
    max_tokens = draw(st.integers(max(min(fitting, capacity // 3) - 3, 1), min(fitting, capacity // 2 + 1)))
    if draw(st.integers(0, 15)) == 7:
        max_tokens = fitting + 1
    output_length = draw(st.one_of(st.none(), st.just(max_tokens), st.integers(1, max_tokens)))
    request = Request(id, arrival, prompt_length, max_tokens, output_length, slo=draw(SLOS))
    request = replace(request, priority=draw(PRIORITIES), tenant=draw(TENANTS))
    family = draw(st.sampled_from([0, 1, 1, 2]))
    if not family:
        return request
    hash_block = draw(st.sampled_from([spec.block_size, spec.block_size, 2, 16]))
    shared = prompt_length if draw(st.booleans()) else draw(st.integers(0, prompt_length))
    ids = hashes(family, shared, id, prompt_length, hash_block)
    return replace(request, hashes=ids, hash_block=hash_block, session=f"{family}")


@st.composite
def workloads(draw, spec: Spec, most: int = 10) -> tuple[Request, ...]:
    burst = draw(st.booleans())
    count = draw(st.integers(2, most))
    times = [0.0] * count if burst else [draw(TIMES) for _ in range(count)]
    return tuple(draw(requests(id, spec, arrival)) for id, arrival in enumerate(times))


REPORTS = st.sampled_from(
    [(0.0, 0, 0.0), (0.0, 0, 0.0), (0.015, 0, 0.0), (0.02, 0, 0.01), (0.0, 1, 0.0), (0.0, 3, 0.02)]
)


@st.composite
def scenarios(draw, composition: st.SearchStrategy[Composition] = COMPOSITIONS, **spec: Any) -> Scenario:
    drawn = draw(specs(**spec))
    workload = draw(workloads(drawn))
    composed = draw(composition)
    if drawn.lockstep and drawn.ranks > 1:
        composed = replace(composed, delay=draw(DELAYS))
    anybody = st.integers(0, len(workload) - 1)
    aborts = draw(st.one_of(st.just([]), st.lists(st.tuples(TIMES, anybody), min_size=1, max_size=3)))
    return Scenario(
        drawn,
        workload,
        composed,
        tuple((max(at, workload[id].arrival), id) for at, id in aborts),
        draw(COSTS),
        draw(st.sampled_from(["front", "back"])),
        draw(st.sampled_from([True, True, False])),
        draw(REPORTS),
    )
