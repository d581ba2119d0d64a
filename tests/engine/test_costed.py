"""Real tensors on SimPy's clock: the same decisions as in simulation, the same tokens as from transformers."""

import pytest

from engine.costed import CostedBackend
from playground.core import Request, Sampling, Spec, Step
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import LaneTimes, Modelled, StepTimes
from playground.workload.source import OpenLoop
from policies.budget import ChunkedPrefill, TokenThrottling, Unified
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import LastArrived

TOKENS = 16


class Steady:
    """Durations by counting tokens, in milliseconds."""

    def __init__(self, stages):
        self.stages = stages

    def of(self, step):
        return StepTimes(0.0, {lane: self.lane(step, lane) for lane in step.lanes})

    def lane(self, step, lane):
        tokens = sum(part.length for part in step.slices if part.lane == lane)
        return LaneTimes((1e-3 * (5 + tokens),) * self.stages, 1e-4)


class Decisions:
    """A recorder that keeps what was decided and what came of it."""

    def __init__(self):
        self.steps: list[Step] = []
        self.tokens: dict[int, list[int]] = {}
        self.events: list[str] = []
        self.outcomes: dict[int, str] = {}

    def __getattr__(self, name):
        return lambda *heard: None  # deaf to all else that a recorder is told

    def launched(self, step, group):
        self.steps.append(step)

    def committed(self, done, step):
        for id, tokens in done.tokens.items():
            self.tokens.setdefault(id, []).extend(tokens)

    def happened(self, event):
        self.events.append(event.kind)

    def ended(self, ended):
        self.outcomes[ended.request.id] = ended.outcome


def requests(prompts, output_length=TOKENS):
    sampling = Sampling(ignore_eos=True)
    return [
        Request(id, id * 4e-3, len(prompt), TOKENS, output_length, tuple(prompt), sampling=sampling)
        for id, prompt in enumerate(prompts * 3)
    ]


def run(requests, policy, spec, wrap, **options):
    backend = wrap(SimBackend(spec, Steady(spec.stages)))
    scheduler = Scheduler(backend.spec, policy, **options)
    decisions = Decisions()
    serve(OpenLoop(requests), scheduler, backend, decisions)
    scheduler.check()
    backend.close()
    return decisions


SPECS = {
    "one rank": ({}, 1),
    "run-ahead": ({}, 2),
    "pipeline": ({"stages": 3}, 1),
    "pipeline with run-ahead": ({"stages": 2}, 2),
    "replicas": ({"ranks": 2}, 1),
    "lockstep": ({"ranks": 2, "lockstep": True}, 1),
}
BUDGETS = {
    "chunked": ChunkedPrefill(tokens=12),
    "unified": Unified(tokens=24),
    "throttling": TokenThrottling(max_prefill=32, min_prefill=4),
}


@pytest.fixture(scope="module")
def answers(oracle, prompts):
    return [oracle(prompt, TOKENS) for prompt in prompts] * 3


@pytest.mark.parametrize("topology", SPECS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_decisions_of_simulation_and_tokens_of_transformers(model, prompts, answers, topology, budget):
    options, run_ahead = SPECS[topology]
    # Few blocks, so that sequences are preempted.
    spec = Spec(blocks=44, block_size=4, max_tokens=64, max_seqs=16, forwards_tokens=True, **options)

    def policy():  # anew for each run: routers remember
        return Composed(BUDGETS[budget], overlap=Overlap(run_ahead))

    simulated = run(requests(prompts), policy(), spec, lambda inner: inner)
    costed = run(requests(prompts), policy(), spec, lambda inner: CostedBackend(model, inner))
    assert costed.steps == simulated.steps
    assert set(costed.outcomes.values()) == {"finished"}
    assert [costed.tokens[id] for id in range(len(answers))] == answers
    assert "recompute" in costed.events or "replicas" in topology


def test_swapping(model, prompts, answers):
    spec = Spec(blocks=40, block_size=4, host_blocks=64, max_tokens=64, max_seqs=16, forwards_tokens=True)
    policy = Composed(BUDGETS["chunked"], victims=LastArrived("swap"))
    costed = run(requests(prompts), policy, spec, lambda inner: CostedBackend(model, inner))
    assert {"copy_out", "copy_in"} <= set(costed.events)
    assert [costed.tokens[id] for id in range(len(answers))] == answers


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_ends_come_from_the_model(model, prompts, answers, run_ahead):
    """The simulation counts on `max_tokens`; the model stops before, at a token that the request names."""
    spec = Spec(blocks=200, block_size=4, max_tokens=64, forwards_tokens=True)
    stop = answers[0][5]
    wanted = [part[: part.index(stop) + 1] if stop in part else part for part in answers]
    stopping = [
        Request(
            r.id,
            r.arrival,
            r.prompt_length,
            TOKENS,
            None,
            r.prompt,
            sampling=Sampling(stop_token_ids=(stop,), ignore_eos=True),
        )
        for r in requests(prompts)
    ]
    policy = Composed(BUDGETS["unified"], overlap=Overlap(run_ahead))
    costed = run(stopping, policy, spec, lambda inner: CostedBackend(model, inner))
    assert [costed.tokens[id] for id in range(len(answers))] == wanted
    assert set(costed.outcomes.values()) == {"finished"}


def test_cached_prefixes_change_no_token(model):
    """Prompts of which a trace knows hash ids only, with and without the prefix cache."""
    spec = Spec(blocks=120, block_size=4, max_tokens=64, forwards_tokens=True)
    chains = [(1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 9), (7, 8), (1, 2, 3, 4, 10)]
    asked = [
        Request(id, id * 0.05, 8 * len(chain) - 3, 8, 8, hashes=chain, hash_block=8) for id, chain in enumerate(chains)
    ]
    policy = Composed(BUDGETS["unified"])
    cached, whole = (
        run(asked, policy, spec, lambda inner: CostedBackend(model, inner), prefix_cache=on) for on in (True, False)
    )
    assert cached.tokens == whole.tokens

    def computed(decisions):
        return sum(part.length for step in decisions.steps for part in step.slices)

    # Three and two whole hashes, none, and four of which the first prompt holds 29 tokens: seven full blocks.
    assert computed(cached) == computed(whole) - (24 + 16 + 0 + 28)


def test_the_models_length_bounds_the_specs(llama):
    inner = SimBackend(Spec(blocks=8, repeats=True), Modelled(Linear(1.0)))
    spec = CostedBackend(llama, inner).spec
    assert spec.max_length == 16384 and not spec.repeats
