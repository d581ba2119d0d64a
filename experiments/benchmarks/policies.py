"""What a decision costs: the median CPU time of `fill` (of `place` for routes) of every policy, in microseconds.

    python -m experiments.benchmarks.policies [NAME ...] [--out FILE]

Every composition of conf/policy, and every part of its groups in the place of its like in `chunked_prefill`. A rank has
16, 256 or 1,024 decodes running and 0 or 1,000 requests waiting (prompts of 100 to 1,599 tokens); before every step one
more arrives and the newest gives up. `full`: no seat is free. `tight`: seats are, but no more KV than this step's
decodes need. `alike`: tight, and 128 wait whose prompts begin alike in 20 families, of which the prefix cache has ten
(320 tokens each): as many as orders look up that go by it. `room`: seats and KV are there, and prompts come in. Every
request has objectives. Only `fill` is timed; what the draft itself costs stands beside it. The bare loop reads two
counters of each decode and lists them: a decision can hardly cost less. Growth: the exponent of time over sequences,
from 256 to 1,024. Routes choose among 8 replicas with loads that change. Exits with 1 if a policy that is not in
`HEAVY` takes longer than the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, product
from math import inf, log
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time_ns
from typing import Any

from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from experiments import launcher, plugins, provenance, settings
from experiments.overrides import completing
from playground.core import Request, Slo, Spec
from playground.draft import Draft
from playground.oracle import oracles
from playground.policy import ClusterView, Load
from playground.rank import Rank
from playground.sequence import Sequence as Served

RESULTS = Path(__file__).parent / "results" / "policies.json"
CONF = Path(__file__).parents[2] / "conf" / "policy"

LIMIT = 150.0
"""Microseconds, with 256 running."""
RUNNING = (16, 256, 1024)
ALIKE = 128
"""Who waits where prompts begin alike: with more, `longest_prefix` and its like fall back to the order of arrival."""
FAMILIES, SHARED_BLOCKS = 20, 20
STEPS, ROUNDS = 15, 5
"""The least of the rounds' medians counts: what else a machine does only adds."""
LOOKED_UP = "looks each of those that wait up in the prefix cache, up to 128"
HEAVY: Mapping[str, str] = {
    "andes": "weighs everybody's experience at every step, and exchanges who runs",
    "budget=qoe": "weighs everybody's experience at every step, and exchanges who runs",
    "scorpio": "weighs the objectives of all that run, for who decodes and for who may start",
    "order=vtc": "charges tenants for every decode",
    "niyama": "looks for the first deadline among all that decode",
    "budget=credits": "pays and charges every decode",
    "mc_sf": "reckons when all will end, for each prompt that comes in",
    "admission=future_peak": "reckons when all will end, for each prompt that comes in",
    "admission=oracle_future_peak": "reckons when all will end, for each prompt that comes in",
    "token_throttling_no_threshold": "admits into the last blocks, and so preempts at every step that is tight",
    "order=longest_prefix": LOOKED_UP,
    "order=hrrn": LOOKED_UP,
    "order=shortest_prefill": LOOKED_UP,
    "order=mlfq": "exchanges who runs: newcomers outrank long answers",
    "admission=early_rejection": "a queue so long is turned away: each time it is a new one of 1,000",
    "admission=load_rejection": "a queue so long is turned away: each time it is a new one of 1,000",
}
"""Policies that may take longer than the limit, and why."""
REPLICAS = 8
DEFAULT = "chunked_prefill"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: microseconds by `running+waiting situation`; `ratio` to the bare loop at 256 + 1,000."""

    name: str
    times: dict[str, float]
    worst: float
    """Of the situations with 256 running."""
    ratio: float
    growth: float
    heavy: str


def main() -> None:
    """Measure the policies named on the command line, else all; print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="beginnings: chunked_prefill, order=sjf, route; all by default")
    parser.add_argument("--out", type=Path, help="where to write JSON; of all policies, results/policies.json")
    given = parser.parse_args()
    wanted = [name for name in names() if not given.names or name.startswith(tuple(given.names))]
    loop = bare_loop()
    rows, routes = [], {}
    for name in wanted:
        if name.startswith("route="):
            routes[name] = place_time(maker(name)())
            print(f"{name}: {routes[name]:.1f} us a placement", flush=True)
        else:
            rows.append(measured(name, loop))
            print(_told(rows[-1]), flush=True)
    drafts = {str(running): draft_time(running) for running in RUNNING}
    record = provenance.facts() | {
        "method": __doc__,
        "cpus": os.cpu_count(),
        "limit": LIMIT,
        "bare_loop": loop,
        "draft": drafts,
        "rows": [asdict(row) for row in rows],
        "routes": routes,
    }
    if out := given.out or (None if given.names else RESULTS):
        provenance.write(out, record)
    if slow := [row.name for row in rows if row.worst > LIMIT and not row.heavy]:
        print(f"above {LIMIT:.0f} us and not in HEAVY: {', '.join(slow)}")
        sys.exit(1)


def _told(row: Row) -> str:
    times = ", ".join(f"{where} {time:.0f}" for where, time in row.times.items())
    return f"{row.name}: {times} us; worst {row.worst:.0f}, {row.ratio:.1f} bare loops, growth {row.growth:.2f}"


# --- which


def names() -> list[str]:
    """Of compositions, and `group=part` for each part."""
    parts = [f"{file.parent.name}={file.stem}" for file in sorted(CONF.glob("*/*.yaml"))]
    return [*(file.stem for file in sorted(CONF.glob("*.yaml"))), *parts]


def maker(name: str) -> Callable[[], Any]:
    """Makes the policy that the command line would compose, a new one each time: policies remember whom they saw."""
    overrides = [f"policy={DEFAULT}", f"policy/{name}"] if "=" in name else [f"policy={name}"]
    for registering in (settings, plugins, launcher):
        registering.register()
    with initialize_config_module("conf", version_base="1.3"):
        config = completing(lambda given: compose("config", given), ["run_dir=unused", *overrides])
    return partial(instantiate, config.policy, _convert_="all")


# --- what a rank holds


class Scene:
    """A rank with so many decodes running and requests waiting, as `where` says: full, tight, alike or room."""

    def __init__(self, running: int, waiting: int, where: str = "full") -> None:
        seats = running if where == "full" else running + 64
        self.spec = Spec(blocks=running * 20 + 2000, max_seqs=seats, layers=(8, 8), spare_layers=1)
        self.tight, self.alike = where in ("tight", "alike"), where == "alike"
        self.news: list[Request] = []
        """Requests that no oracle was told of."""
        self.kept: list[int] = []
        """Blocks that nobody in the scene can have."""
        self.rank = Rank(0, self.spec, True, True)
        self.rng = Random(0)
        self.ids = count()
        self.ordinal = 0
        for place in range(running):
            self._decode(200 + place % 64)
        if self.alike:
            for family in range(FAMILIES // 2):
                self._publish(family)
        for _ in range(waiting):
            self._arrive()
        self.sizes = running, waiting

    def _request(self, prompt: int) -> Request:
        id = next(self.ids)
        slo = Slo(1000.0, 0.05 if id % 2 else 0.1)
        tenant, session = f"{id % 8}", f"{id % 100}"
        request = Request(
            id, id * 1e-3, prompt, 1000, 100 + id % 900, priority=id % 4, tenant=tenant, session=session, slo=slo
        )
        self.news.append(request)
        return request

    def _arrive(self) -> None:
        request = self._request(100 + self.rng.randrange(1500))
        if self.alike:
            blocks = request.prompt_length // request.hash_block
            own = range((request.id + FAMILIES) * 1000, (request.id + FAMILIES) * 1000 + blocks)
            request = replace(request, hashes=(*_family(request.id % FAMILIES), *own)[:blocks])
        sequence = Served(request, 0)
        sequence.keys = self.rank.keys(request)
        self.rank.enqueue(sequence)

    def _publish(self, family: int) -> None:
        """Its prefix is in the cache, and stays there."""
        for block, key in zip(self.rank.pool.allocate(SHARED_BLOCKS), _family(family), strict=True):
            self.rank.pool.publish(block, key)

    def _decode(self, context: int) -> None:
        self.rank.enqueue(sequence := Served(self._request(context), 0))
        self.rank.admit(sequence, [], 0.0)
        sequence.blocks = self.rank.pool.allocate(self.spec.blocks_for(context))
        sequence.launched = context
        sequence.promised = sequence.returned = 1
        sequence.length = context + 1
        sequence.placed_epoch = 0

    @property
    def as_made(self) -> bool:
        """Whether about as many run and wait as at first: who changes places with whom is the policy's."""
        running, waiting = self.sizes
        return len(self.rank.running) >= 0.9 * running and len(self.rank.waiting) >= 0.9 * waiting

    def draft(self) -> Draft:
        self.ordinal += 1
        return Draft(self.rank, self.spec, self.ordinal * 0.02 + 2.0, self.rng, (), self.ordinal, self.spec.layers)

    def next(self) -> None:
        """All that was placed came back; of those that wait the newest gives up and another one arrives.

        For each prompt that came in the longest running sequence ends, and another one arrives.
        """
        rank, running = self.rank, self.sizes[0]
        for sequence in rank.running.values():
            sequence.returned = sequence.promised
        came = len(rank.running) - running
        for sequence in list(rank.running.values())[: max(came, 0)]:
            rank.end(sequence)
            self._arrive()
        if rank.waiting:
            rank.end(rank.waiting[next(reversed(rank.waiting))])
            self._arrive()

    def tighten(self) -> None:
        """Leave just the blocks that a decode of everybody takes."""
        pool, size = self.rank.pool, self.spec.block_size
        more = pool.free - sum(one.launched == len(one.blocks) * size for one in self.rank.running.values())
        if more > 0:
            self.kept += pool.allocate(more)
        elif more < 0:
            pool.release([self.kept.pop() for _ in range(-more)])


def _family(family: int) -> tuple[int, ...]:
    """Hashes of the blocks that its prompts begin with."""
    return tuple(range(family * 1000, family * 1000 + SHARED_BLOCKS))


# --- how long


def fills(make: Callable[[], Any], scene_of: Callable[[], Scene], steps: int = STEPS) -> Iterator[int]:
    """Nanoseconds of each `fill`."""
    policy, scene = make(), scene_of()
    for _ in range(steps):
        if not scene.as_made:
            policy, scene = make(), scene_of()
        for oracle, request in product(oracles(policy), scene.news):
            oracle.learn(request)
        scene.news.clear()
        if scene.tight:
            scene.tighten()
        draft = scene.draft()
        start = thread_time_ns()
        policy.fill(draft)
        yield thread_time_ns() - start
        scene.next()


def fill_time(make: Callable[[], Any], running: int, waiting: int, where: str) -> float:
    """Its median, in microseconds."""
    return median(fills(make, partial(Scene, running, waiting, where))) / 1e3


def measured(name: str, loop: Mapping[str, float]) -> Row:
    """All situations of one policy."""
    make, times = maker(name), dict[str, float]()
    few, many = RUNNING[1:]
    cases = [(running, waiting, "full") for running in RUNNING for waiting in (0, 1000)]
    cases += [(running, 1000, "tight") for running in RUNNING]
    cases += [(few, ALIKE, "alike"), (few, 1000, "room")]
    for _ in range(ROUNDS):  # each time all of them: what else a machine does lasts for longer than one
        for running, waiting, where in cases:
            case = f"{running}+{waiting} {where}"
            times[case] = min(fill_time(make, running, waiting, where), times.get(case, inf))
    fewer, most = (max(times[f"{running}+1000 {where}"] for where in ("full", "tight")) for running in (few, many))
    worst = max(time for case, time in times.items() if case.startswith(f"{few}+"))
    growth = log(most / fewer) / log(many / few)
    return Row(name, times, worst, worst / loop[str(few)], growth, HEAVY.get(name, ""))


def _timed(what: Callable[[], object], times: int = STEPS) -> float:
    """Its median, in microseconds."""
    spent = []
    for _ in range(times):
        start = thread_time_ns()
        what()
        spent.append(thread_time_ns() - start)
    return median(spent) / 1e3


def bare_loop() -> dict[str, float]:
    """By the number of decodes."""

    times = {}
    for running in RUNNING:
        decodes = list(Scene(running, 0).rank.running.values())
        times[str(running)] = _timed(partial(_listed, decodes))
    return times


def _listed(decodes: Sequence[Served]) -> list[tuple[int, int]]:
    return [(one.id, one.launched) for one in decodes]


def draft_time(running: int) -> float:
    """Of making a draft."""
    return _timed(Scene(running, 1000).draft)


def place_time(policy: Any, requests: int = 400) -> float:
    """Of a placement: prompts of 64 blocks, of which families of 20 share 40."""
    rng, spent = Random(0), []
    for id in range(requests):
        loads = [Load(rank, rng.randrange(9), rng.randrange(99), 500, 900, 1000) for rank in range(REPLICAS)]
        keys = tuple((id % 20 if block < 40 else 1000 + id, block) for block in range(64))
        view = ClusterView(id * 1e-3, id // 100 * 0.1, loads, rng, lambda rank: 0, False, partial(tuple, keys))
        request = Request(id, id * 1e-3, 1024, 100, session=f"{id % 50}").view()
        start = thread_time_ns()
        policy.place(request, view)
        spent.append(thread_time_ns() - start)
    return median(spent) / 1e3


if __name__ == "__main__":
    main()
