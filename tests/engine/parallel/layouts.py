"""What the tokens of many ranks are compared over: layouts, models, policies and how they are served.

A `Crew` is the workers of one layout and model. They serve case after case: a case is a scheduler of its own, with a
policy as users make it, whose steps and requests get numbers that no other case has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate

from engine.backend import TorchBackend
from engine.config import find_config
from engine.load import load_model
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.layout import Layout
from engine.parallel.supervise import Hire
from engine.tiny import VOCABULARY, tiny
from experiments import launcher, settings
from playground.backend import Backend
from playground.core import Done, Request, Sampling, Spec, Step
from playground.loop import serve
from playground.policy import Policy
from playground.scheduler import Event, Scheduler
from playground.trace import NoTrace
from playground.workload.source import OpenLoop
from tests.engine.parallel.forked import forked

LAYOUTS: Mapping[str, Layout] = {
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "pp2": Layout(stages=2),
    "pp2_uneven": Layout(stages=2, layers=(3, 1)),
    "pp3": Layout(stages=3),
    "pp3_uneven": Layout(stages=3, layers=(1, 2, 1)),
    "pp4": Layout(stages=4),
    "dp2": Layout(replicas=2),
    "dp3": Layout(replicas=3),
    "dp4": Layout(replicas=4),
    "tp2_pp2": Layout(stages=2, tp=2),
    "tp2_pp2_uneven": Layout(stages=2, tp=2, layers=(1, 3)),
    "tp2_dp2": Layout(tp=2, replicas=2),
    "pp2_dp2": Layout(stages=2, replicas=2),
    "tp2_ep2": Layout(tp=2, ep=2),
    "tp2_ep2_a2a": Layout(tp=2, ep=2, exchange="all_to_all"),
    "tp4_ep2": Layout(tp=4, ep=2),
    "tp4_ep4_a2a": Layout(tp=4, ep=4, exchange="padded_all_to_all"),
    "tp2_pp2_ep2": Layout(tp=2, stages=2, ep=2),
    "tp2_dp2_ep2": Layout(tp=2, replicas=2, ep=2, exchange="all_to_all"),
    "dpa2": Layout(replicas=2, lockstep=True),
    "dpa2_ep2": Layout(replicas=2, ep=2, lockstep=True, exchange="padded_all_gather"),
    "dpa4_ep4_a2a": Layout(replicas=4, ep=4, lockstep=True, exchange="all_to_all"),
    "dpa2_tp2_ep4_a2a": Layout(replicas=2, tp=2, ep=4, lockstep=True, exchange="padded_all_to_all"),
    "dpa2_pp2_ep2": Layout(replicas=2, stages=2, ep=2, lockstep=True),
}
"""All up to four ranks; three do not share the tiny models' eight heads."""

MODELS = ("llama", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3")

POLICIES: Mapping[str, tuple[str, ...]] = {
    "static": ("+policy.budget.batch=4",),
    "orca": ("+policy.budget.batch=4",),
    "vllm_v0": ("+policy.budget.tokens=128",),
    "vllm_v1": ("+policy.budget.tokens=24",),
    "chunked_prefill": ("+policy.budget.tokens=32", "policy/victims=largest"),
    "token_throttling": ("+policy.budget.max_prefill=48", "+policy.budget.min_prefill=8", "+policy.budget.spread=2"),
    "token_throttling_2025": (
        "+policy.budget.max_prefill=48",
        "+policy.budget.min_prefill=8",
        "+policy.budget.spread=2",
        "policy/route=least_outstanding",
    ),
    "trtllm": ("+policy.budget.tokens=128", "+policy.budget.wait_steps=2", "+policy.budget.wait_share=0.5"),
}
"""Policies that use every phase (the others of conf/policy are made of the same ones), with numbers at which a few
short prompts are cut, and have to wait for one another."""

RESERVING = ("static", "orca", "trtllm")
"""Those of them that set aside what the longest answer takes, and preempt nobody."""

BLOCKS = {"ample": 128, "tight": 5, "swap": 5}
"""KV blocks of 16 tokens on each replica; `tight` holds the longest request and a short one. `swap`: to the host."""

WAYS: Mapping[str, tuple[Sampling, ...]] = {
    "greedy": (Sampling(),),
    "mixed": (
        Sampling(temperature=0.8, seed=3),
        Sampling(),
        Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=4),
        Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
    ),
}
"""How tokens are picked, by turns."""

CACHES = ("shared", "off")
AHEAD = (1, 2)

SIZES = {"blocks": BLOCKS["ample"], "host_blocks": 64, "max_seqs": 6, "max_tokens": 160, "max_length": 256}
COUNT = 6
"""Requests of a case."""


class Case(NamedTuple):
    """One way to serve the workload. `ahead`: steps that may be outstanding on each stage."""

    policy: str
    kv: str = "ample"
    sampling: str = "mixed"
    cache: str = "shared"
    ahead: int = 1

    def __str__(self) -> str:
        return f"{self.policy}-{self.kv}-{self.sampling}-{self.cache}-ahead{self.ahead}"


def row(layout: str, model: str, case: Case) -> dict[str, Any]:
    """What a case is made of. A layout is one of its kind: policies and models meet kinds, not numbers of ranks."""
    chosen = LAYOUTS[layout]
    kinds = {
        "pipeline": chosen.stages > 1,
        "tensor": chosen.tp > 1,
        "replicas": chosen.replicas > 1,
        "uneven": bool(chosen.layers),
        "ep": chosen.ep > 1,
        "lockstep": chosen.lockstep,
    }
    return {"layout": layout, "model": model, **kinds, **case._asdict()}


def models(layout: str) -> list[str]:
    """Those that a layout can share."""
    ep, pools = LAYOUTS[layout].ep, LAYOUTS[layout].lockstep
    counts = {model: find_config(tiny(model)).shape.experts for model in MODELS}
    return [
        model for model, experts in counts.items() if (experts and experts.count % ep == 0) or (ep == 1 and not pools)
    ]


def cases(policy: str) -> list[Case]:
    """All ways to serve with a policy."""
    return [Case(*chosen) for chosen in product((policy,), BLOCKS, WAYS, CACHES, AHEAD)]


@cache
def policy(name: str, swaps: bool, ahead: int) -> Any:
    """A policy's configuration, as the command line would compose it."""
    settings.register()
    launcher.register()
    overrides = [f"policy={name}", *POLICIES[name]]
    overrides += ["+policy.victims.how=swap"] * swaps
    overrides += [f"+policy.overlap.run_ahead={ahead}"] * (ahead > 1)
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=overrides).policy


def made(case: Case) -> Policy:
    return instantiate(policy(case.policy, case.kv == "swap", case.ahead), _convert_="all")


@cache
def workload(sampling: str) -> tuple[Request, ...]:
    """Short requests with tokens of their own, of which every other one shares its first two blocks."""
    rng, ways = Random(7), WAYS[sampling]
    beginning = _draw(rng, 32)
    made = []
    for id in range(COUNT):
        prompt = beginning + _draw(rng, rng.randint(1, 12)) if id % 2 else _draw(rng, rng.randint(14, 44))
        own = range(10 * id + 10, 10 * id + 8 + len(prompt) // 16)
        hashes = (1, 2, *own) if id % 2 else ()
        output = rng.randint(10, 18)
        more = dict(prompt=prompt, hashes=hashes, sampling=ways[id % len(ways)])
        made.append(Request(id, id * 0.001, len(prompt), output + 4, output, **more))
    return tuple(made)


def _draw(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


class Turn:
    """A backend's next run: it begins now, and its steps have numbers from `first` on. Keeps what was sampled."""

    def __init__(self, inner: Backend, spec: Spec, first: int) -> None:
        self.spec = spec
        self.tokens: dict[int, list[int]] = {}
        self.steps = 0
        self._inner, self._first, self._origin = inner, first, inner.now()

    def now(self) -> float:
        return self._inner.now() - self._origin

    def launch(self, step: Step) -> None:
        self.steps = max(self.steps, step.id + 1)
        parts = step.columns, step.copies, step.starts, step.ends, step.dummies, step.repeat, step.move
        self._inner.launch(Step(step.id + self._first, step.group, step.planned, *parts))

    def wait(self, until: float = inf) -> Done | None:
        done = self._inner.wait(until + self._origin)
        if done is None:
            return None
        for id, tokens in done.tokens.items():
            self.tokens.setdefault(id, []).extend(tokens)
        times = {name: getattr(done, name) - self._origin for name in ("launched", "started", "finished")}
        spans = tuple((started - self._origin, finished - self._origin) for started, finished in done.stages)
        return replace(done, step=done.step - self._first, stages=spans, **times)

    def close(self) -> None:
        """The workers go on."""


class Events(NoTrace):
    """How often anybody gave way."""

    def __init__(self) -> None:
        self.preempted = 0

    def happened(self, event: Event) -> None:
        self.preempted += event.kind in ("recompute", "swap")


class Served(NamedTuple):
    tokens: tuple[tuple[int, ...], ...]
    """Of each request, in order."""
    preempted: int


@dataclass
class Crew:
    """A backend that serves one case after the other."""

    backend: Backend
    cases: int = 0
    steps: int = 0
    """Numbers that have been given away."""

    def serve(self, case: Case) -> Served:
        turn, asked = self.turn(case)
        scheduler, events = Scheduler(turn.spec, made(case), seed=5, prefix_cache=case.cache == "shared"), Events()
        serve(OpenLoop(asked), scheduler, turn, events)
        scheduler.check()
        return self.served(turn, asked, events.preempted)

    def turn(self, case: Case) -> tuple[Turn, list[Request]]:
        """For who serves and records a case otherwise: what takes the steps, and the requests. Then call `served`."""
        first, self.cases = COUNT * self.cases, self.cases + 1
        spec = replace(self.backend.spec, blocks=BLOCKS[case.kv], host_blocks=24 * (case.kv == "swap"))
        return Turn(self.backend, spec, self.steps), [
            replace(one, id=one.id + first) for one in workload(case.sampling)
        ]

    def served(self, turn: Turn, asked: Sequence[Request], preempted: int = 0) -> Served:
        self.steps += turn.steps
        return Served(tuple(tuple(turn.tokens.get(one.id, ())) for one in asked), preempted)

    def close(self) -> None:
        self.backend.close()


def crew(layout: str, model: str, folder: Path, hire: Callable[[int], Hire] = forked) -> Crew:
    """Workers, ready to serve."""
    chosen = LAYOUTS[layout]
    config = WorkerConfig(str(tiny(model)), chosen, f"file://{folder / 'meet'}", sizes=SIZES)
    return Crew(ParallelBackend(config, hire(chosen.ranks)))


@cache
def alone(model: str) -> Crew:
    """One rank."""
    return Crew(TorchBackend(load_model(tiny(model)), **SIZES))


@cache
def expected(model: str, sampling: str) -> tuple[tuple[int, ...], ...]:
    """The tokens of one rank that has all the memory it can use, and the simplest policy."""
    return alone(model).serve(Case("vllm_v0", sampling=sampling, cache="off")).tokens


def difference(model: str, case: Case, found: Served) -> str:
    """What is wrong with what was served, in words; nothing if all is right."""
    for id, (ours, theirs) in enumerate(zip(found.tokens, expected(model, case.sampling), strict=True)):
        if ours != theirs:
            same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            where = "one is the beginning of the other" if same is None else f"token {same} is the first other one"
            return f"{case}: request {id} got {len(ours)} tokens for {len(theirs)}, {where}"
    return ""
