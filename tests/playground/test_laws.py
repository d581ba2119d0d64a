"""DESIGN's laws, for every composition of policies, on workloads and devices that are small enough to break often."""

import random
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from playground.core import Request, Spec
from playground.draft import How
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import SCHEMAS, Trace, expand, read
from policies.admission import Always, FullPrompt, MaxLength, Watermark
from policies.balanced import TokenThrottling2026
from policies.budget import ChunkedPrefill, Orca, PrefillFirst, Static, TokenThrottling, TokenThrottling2025, Unified
from policies.composed import Composed
from policies.temporal import TemporalPhases
from policies.victims import Largest, LastArrived
from tests.playground.fakes import Greedy, Log, done, nothing
from tests.playground.laws import serve_under, simulate
from tests.playground.strategies import Composition, Scenario, scenarios

MANY = settings(max_examples=12 * settings.default.max_examples)
SOME = settings(max_examples=5 * settings.default.max_examples)


@MANY
@given(scenarios())
def test_every_law_for_every_composition(scenario):
    simulate(scenario)


# --- determinism


def traced(scenario: Scenario, folder: str, seed: int = 0) -> dict[str, bytes]:
    backend = SimBackend(scenario.spec, Modelled(scenario.cost, scenario.spec.stages))
    scheduler = scenario.scheduler(scenario.composition.policy(), seed)
    with Trace(folder) as trace:
        serve(scenario.source(), scheduler, backend, trace)
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@given(scenarios())
def test_equal_seeds_give_equal_bytes(scenario):
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        files = traced(scenario, one)
        assert files == traced(scenario, other)
        assert set(files) == {f"{name}.parquet" for name in SCHEMAS}


class Sleepy:
    """A host that stops for a moment whenever it likes."""

    def __init__(self, inner, wild: random.Random) -> None:
        self._inner = inner
        self._wild = wild

    def __getattr__(self, name):
        attribute = getattr(self._inner, name)
        if callable(attribute) and self._wild.random() < 0.2:
            time.sleep(self._wild.random() * 5e-4)
        return attribute


@given(scenarios())
def test_nothing_depends_on_the_hosts_speed(scenario):
    wild = random.Random(7)
    awake = simulate(scenario)
    sleepy = simulate(scenario, wrap=lambda part: Sleepy(part, wild))
    assert sleepy.steps == awake.steps
    assert sleepy.dones == awake.dones
    assert sleepy.events == awake.events


# --- quiet stretches

ONE_TOKEN_PROMPTS = Scenario(
    Spec(blocks=5, block_size=1),
    (Request(0, 0.0, 1, 3), Request(1, 0.0, 1, 2)),
    Composition(TokenThrottling(max_prefill=1, min_prefill=1, wt=False)),
)
"""The second prompt is one token before the first one's decode, but its own decode comes after that."""


@example(ONE_TOKEN_PROMPTS)
@SOME
@given(scenarios())
def test_quiet_stretches_in_one_go_are_what_stepping_gives(scenario):
    merged = scenario.but(spec=replace(scenario.spec, repeats=True))
    simulate(merged)
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        traced(scenario, one)
        traced(merged, other)
        size = scenario.spec.block_size
        for stepped, expanded in zip(expand(one, size), expand(other, size), strict=True):
            assert stepped.to_pylist() == expanded.to_pylist()
        for name in ("requests", "events", "arrivals"):
            assert rows(one, name, scenario.spec) == rows(other, name, scenario.spec)


def rows(folder: str, name: str, spec: Spec) -> list[dict]:
    """Of a table, but for looks; in order of time only where replicas end something at the same time."""
    columns = [column for column in SCHEMAS[name].names if column != "look"]
    found = read(folder, name, columns).to_pylist()
    return sorted(found, key=str) if len(spec.groups) > 1 else found


def test_a_lone_decode_is_one_row():
    spec = Spec(blocks=20, block_size=4, repeats=True)
    scenario = Scenario(spec, (Request(0, 0.0, 4, 40),), Composition(ChunkedPrefill()))
    laws = simulate(scenario)
    assert [done.count for done in laws.dones] == [1, 39]


# --- order of equals


@given(scenarios(), st.randoms(use_true_random=False))
def test_laws_hold_for_equal_arrivals_in_any_order(scenario, rng):
    ids = list(range(len(scenario.requests)))
    rng.shuffle(ids)
    together = tuple(replace(request, id=id, arrival=0.0) for id, request in zip(ids, scenario.requests, strict=True))
    simulate(scenario.but(requests=together))


# --- no composition stalls


BUDGETS = {
    "static": Static(8),
    "orca": Orca(8),
    "prefill_first": PrefillFirst(4096),
    "unified": Unified(2048),
    "chunked_prefill": ChunkedPrefill(2048),
    "token_throttling": TokenThrottling(),
    "token_throttling without ut": TokenThrottling(ut=False),
    "token_throttling_2025": TokenThrottling2025(),
    "token_throttling_2025 without wt": TokenThrottling2025(wt=False),
    "token_throttling_2026": TokenThrottling2026(),
    "td_pipe": TemporalPhases(),
}


def half_prefilled(seed, budget, admission=None, victims=None, max_tokens=None, **spec) -> Scenario:
    """gllm.md §1.6 case 5: prompts of 200 to 2500 tokens, all present at once, in a pool of 4000: gLLM stalls."""
    rng = random.Random(seed)
    shapes = [(rng.randint(200, 2500), rng.randint(50, 400)) for _ in range(60)]
    requests = tuple(
        Request(id, 0.0, prompt, max_tokens or length, length) for id, (prompt, length) in enumerate(shapes)
    )
    options = dict(blocks=250, block_size=16, stages=4, max_tokens=4096, forwards_tokens=True)
    composition = Composition(budget, admission or Always(), victims or LastArrived())
    return Scenario(Spec(**(options | spec)), requests, composition, cost=Linear(0.01, 1e-5))


class Ends(Log):
    """Accounts are checked by other tests: these runs are long."""

    def launched(self, step, group): ...
    def committed(self, done, step): ...


def all_finish(scenario: Scenario) -> None:
    log = serve_under(Ends, scenario)
    assert set(log.outcomes.values()) == {"finished"} and len(log.outcomes) == 60


@pytest.mark.parametrize("budget", BUDGETS)
def test_half_prefilled_prompts_that_fill_the_pool_stall_nobody(budget):
    all_finish(half_prefilled(0, BUDGETS[budget]))


CHOICES = [
    (Watermark(), Largest()),
    (FullPrompt(), LastArrived(How.SWAP)),
    (MaxLength(), Largest(How.SWAP)),
    (Always(), Largest(How.SWAP)),
]


@pytest.mark.parametrize("place, budget", list(enumerate(BUDGETS)))
def test_nor_do_they_with_other_admissions_and_victims(place, budget):
    admission, victims = CHOICES[place % len(CHOICES)]
    all_finish(half_prefilled(place, BUDGETS[budget], admission, victims, host_blocks=100))


@pytest.mark.parametrize("budget", BUDGETS)
def test_nor_in_a_larger_pool_with_a_far_max_tokens(budget):
    all_finish(half_prefilled(5, BUDGETS[budget], blocks=1250, max_tokens=4096))


def test_swapped_sequences_do_not_drive_one_another_out_for_ever():
    """Either holds half of what the pool has and grows: while one is on its way in, the other is not driven out."""
    spec = Spec(blocks=15, block_size=4, host_blocks=200, max_tokens=16, stages=4)
    requests = (Request(0, 0.0, 3, 31), Request(1, 0.14, 3, 31))
    composition = Composition(PrefillFirst(64), victims=Largest(How.SWAP))
    simulate(Scenario(spec, requests, composition, cost=Linear(0.01, per_block=0.004)))


def test_in_lockstep_a_stalled_rank_does_not_wait_until_the_others_idle():
    """Two half-prefilled prompts fill rank 0, and a step of rank 1 is in flight, as one always may be."""

    def half_of_each(draft):
        for sequence in list(draft.waiting):
            draft.take(sequence, 16)

    spec = Spec(blocks=8, block_size=4, ranks=2, lockstep=True, stages=2)
    scheduler = Scheduler(spec, Greedy(half_of_each, half_of_each, nothing))
    for id, prompt in enumerate((30, 2, 30)):  # the second goes to rank 1
        scheduler.arrive(Request(id, 0.0, prompt, 3), 0.0)
    (group,) = scheduler.groups
    scheduler.commit(done(scheduler.next_step(group, 0.0)))
    beside = scheduler.next_step(group, 1.0)
    assert {part.rank for part in beside.slices} == {1} and scheduler.ranks[0].pool.free == 0
    scheduler.policy = Composed(ChunkedPrefill())
    step = scheduler.next_step(group, 1.0)
    assert [(part.sequence, part.start) for part in step.slices if part.rank == 0] == [(0, 16)]
