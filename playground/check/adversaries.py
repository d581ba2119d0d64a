"""Workloads that policies stumble over, each kind with a name and drawn from a seed.

All are small: what goes wrong shows within some dozens of tokens, and a person can follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from playground.check.case import Case
from playground.core import Request, Slo, Spec

Family = Callable[[Random], Case]


def cases(family: str, count: int, seed: int) -> Iterator[Case]:
    """So many cases of a family; equal seeds, equal cases."""
    for number in range(count):
        # A string seeds by its bytes (SHA-512), not by a hash that changes from process to process.
        yield _with_lengths(FAMILIES[family](Random(f"{family} {seed} {number}")))


def _with_lengths(case: Case) -> Case:
    """Oracles want to know how long every answer will be."""
    known = [replace(one, output_length=one.output_length or one.max_tokens) for one in case.requests]
    return replace(case, requests=tuple(known))


def _requests(rng: Random, count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> list[Request]:
    """All at once. Half of them end before `max_tokens`."""
    drawn = []
    for id in range(count):
        allowed = rng.randint(*answers)
        output = allowed if rng.random() < 0.5 else rng.randint(1, allowed)
        drawn.append(Request(id, 0.0, rng.randint(*prompts), allowed, output))
    return drawn


def _spread(rng: Random, requests: list[Request], seconds: float) -> tuple[Request, ...]:
    """The same, arriving one after another within so many seconds."""
    times = sorted(round(rng.uniform(0, seconds), 3) for _ in requests)
    return tuple(replace(request, arrival=at) for request, at in zip(requests, times, strict=True))


def tiny_pool(rng: Random) -> Case:
    """KV for two or three of a dozen sequences; at times a host's pool to swap to."""
    block = rng.choice([1, 4, 16])
    spec = Spec(
        blocks=rng.randint(48, 80) // block,
        block_size=block,
        host_blocks=rng.choice([0, 0, 3, 200]),
        max_tokens=rng.choice([16, 64]),
        max_seqs=rng.choice([64, 4]),
        forwards_tokens=rng.random() < 0.5,
    )
    drawn = _requests(rng, rng.randint(4, 12), (2, 20), (2, 24))
    return Case("tiny_pool", spec, _spread(rng, drawn, rng.choice([0.0, 0.2])), run_ahead=rng.choice([None, 1, 2, 3]))


def huge_prompt(rng: Random) -> Case:
    """One prompt of many steps among short ones, while others decode."""
    spec = Spec(blocks=240, block_size=4, max_tokens=64, stages=rng.choice([1, 1, 2]), forwards_tokens=True)
    drawn = _requests(rng, rng.randint(4, 8), (2, 8), (16, 32))
    huge = Request(len(drawn), 0.05, rng.randint(520, 640), rng.randint(2, 6))
    return Case("huge_prompt", spec, (*drawn, huge))


def burst(rng: Random) -> Case:
    """Everybody at once, then nobody, then everybody again."""
    spec = Spec(blocks=64, block_size=4, max_tokens=32, max_seqs=rng.choice([6, 64]), stages=rng.choice([1, 2, 4]))
    drawn = _requests(rng, 16, (2, 24), (2, 12))
    later = rng.choice([0.05, 1.0])
    return Case("burst", spec, tuple(replace(one, arrival=0.0 if one.id < 8 else later) for one in drawn))


def equal(rng: Random) -> Case:
    """Requests that differ in nothing, in two waves."""
    prompt, answer = rng.randint(3, 20), rng.randint(4, 16)
    spec = Spec(blocks=rng.choice([20, 80]), block_size=4, max_tokens=32, stages=rng.choice([1, 1, 3]))
    times = [0.0] * rng.randint(4, 8) + [0.03] * 4
    return Case("equal", spec, tuple(Request(id, at, prompt, answer) for id, at in enumerate(times)))


def priorities(rng: Random) -> Case:
    """Equal but for their priorities, present at once, more than there are seats or blocks for."""
    prompt = rng.randint(4, 8)
    crowded = rng.random() < 0.7
    spec = Spec(blocks=16 if crowded else 200, block_size=4, max_tokens=64, max_seqs=64 if crowded else 3)
    answer = rng.randint(12, 24) if crowded else rng.randint(4, 12)
    ranks = [rng.randint(0, 3) for _ in range(rng.randint(5, 10))]
    requests = tuple(Request(id, 0.0, prompt, answer, priority=rank) for id, rank in enumerate(ranks))
    return Case("priorities", spec, requests)


def aborts(rng: Random) -> Case:
    """Clients go away: before, while and after they are served."""
    spec = Spec(blocks=24, block_size=4, max_tokens=32, stages=rng.choice([1, 2, 4]), forwards_tokens=True)
    requests = _spread(rng, _requests(rng, 10, (2, 24), (2, 20)), 0.2)
    leavers = rng.sample(requests, 5)
    gone = tuple(sorted((round(one.arrival + rng.choice([0.0, 0.01, 0.05, 0.2]), 3), one.id) for one in leavers))
    return Case("aborts", spec, requests, gone, run_ahead=rng.choice([None, 2]))


def prefixes(rng: Random) -> Case:
    """Some prompts begin like others; in every second case none does, however often it is computed again."""
    size = 4
    shared = rng.random() < 0.5
    spec = Spec(blocks=rng.choice([16, 60]), block_size=size, max_tokens=32, forwards_tokens=rng.random() < 0.5)
    requests = []
    for one in _requests(rng, 10, (8, 32), (2, 16)):
        chunks, common = one.prompt_length // size, rng.randint(1, 4) if shared else 0
        ids = tuple(chunk if chunk < common else 1000 * (one.id + 1) + chunk for chunk in range(chunks))
        requests.append(replace(one, hashes=ids, hash_block=size))
    return Case("prefixes", spec, _spread(rng, requests, rng.choice([0.0, 0.3])))


def pipeline(rng: Random) -> Case:
    """Little but decodes in a pipeline, and their number changes; at times planned ahead of results."""
    stages = rng.choice([2, 3, 4, 4])
    spec = Spec(blocks=220, block_size=16, max_tokens=64, stages=stages, forwards_tokens=rng.random() < 0.5)
    count = rng.randint(5 * stages, 7 * stages)
    drawn = [Request(id, 0.0, rng.randint(1, 3), rng.randint(20, 90)) for id in range(count)]
    requests = _spread(rng, drawn, rng.choice([0.0, 1.0]))
    return Case("pipeline", spec, requests, run_ahead=rng.choice([None, None, 2, 3]))


def stream(rng: Random) -> Case:
    """Prompts go on coming, one a step, while earlier ones decode."""
    spec = Spec(blocks=400, block_size=4, max_tokens=64, max_seqs=rng.choice([64, 12]))
    drawn = _requests(rng, 30, (16, 40), (10, 20))
    return Case("stream", spec, tuple(replace(one, arrival=round(0.01 * one.id, 2)) for one in drawn))


def half_prefilled(rng: Random) -> Case:
    """Prompts that together are several times the pool, all there at once, in a pipeline (gllm.md 1.6, case 5)."""
    spec = Spec(blocks=25, block_size=4, max_tokens=32, stages=rng.choice([1, 4]), forwards_tokens=True)
    return Case("half_prefilled", spec, tuple(_requests(rng, 10, (12, 60), (3, 12))))


def misfits(rng: Random) -> Case:
    """Among others, requests that the pool, the longest length or one step can never hold."""
    spec = Spec(blocks=16, block_size=4, max_tokens=16, max_length=60)
    drawn = _requests(rng, 5, (2, 12), (2, 12))
    never = [Request(5, 0.0, 70, 4), Request(6, 0.01, 30, 40), Request(7, 0.02, 40, 6), Request(8, 0.03, 4, 4)]
    return Case("misfits", spec, (*(one for one in drawn), *never))


def replicas(rng: Random) -> Case:
    """Several replicas behind a router, in every second case with loads that are not fresh."""
    spec = Spec(blocks=24, block_size=4, max_tokens=32, ranks=rng.choice([2, 3]), stages=rng.choice([1, 1, 2]))
    reports = rng.choice([(0.0, 0, 0.0), (0.015, 0, 0.0), (0.0, 3, 0.02)])
    requests = _spread(rng, _requests(rng, 16, (2, 24), (2, 16)), 0.3)
    return Case("replicas", spec, requests, reports=reports)


def lockstep(rng: Random) -> Case:
    """Ranks that step together, so that each waits for the others."""
    spec = Spec(blocks=24, block_size=4, max_tokens=32, ranks=rng.choice([2, 3]), lockstep=True)
    return Case("lockstep", spec, _spread(rng, _requests(rng, 14, (2, 24), (2, 16)), 0.3))


def deadlines(rng: Random) -> Case:
    """Objectives from what cannot be kept to what cannot be missed, of several tenants."""
    spec = Spec(blocks=40, block_size=4, max_tokens=32, max_seqs=8)
    limits = [Slo(), Slo(0.001, 0.001), Slo(0.1, 0.02), Slo(10.0, 1.0)]
    drawn = _requests(rng, 14, (2, 24), (2, 16))
    given = [replace(one, slo=rng.choice(limits), tenant=rng.choice("abc")) for one in drawn]
    return Case("deadlines", spec, _spread(rng, given, 0.3), per_token=0.0005)


def ties(rng: Random) -> Case:
    """Equal requests, one when the last one has long ended: to a router all replicas are alike."""
    spec = Spec(blocks=40, block_size=4, ranks=rng.choice([2, 4]))
    return Case("ties", spec, tuple(Request(id, 0.2 * id, 8, 4) for id in range(40)))


def stale_loads(rng: Random) -> Case:
    """Many equal requests between two reports of the load; by the first all replicas but one are at work."""
    ranks = rng.choice([2, 4])
    spec = Spec(blocks=400, block_size=4, ranks=ranks)
    early = [Request(id, 0.5, 8, 70) for id in range(ranks - 1)]
    requests = (*early, *(Request(id, 1.01 + 0.001 * id, 8, 4) for id in range(ranks - 1, 12 * ranks)))
    return Case("stale_loads", spec, requests, reports=(1.0, 0, 0.0))


def uneven(rng: Random) -> Case:
    """A long request first, which one replica then has and the others have not; many short equal ones after it."""
    ranks = rng.choice([2, 4])
    spec = Spec(blocks=200, block_size=4, max_tokens=64, ranks=ranks)
    long = Request(0, 0.0, 60, 300)
    short = [Request(id, round(0.1 + 0.03 * id, 3), 8, 4) for id in range(1, 12 * ranks + 1)]
    return Case("uneven", spec, (long, *short), reports=rng.choice([(0.0, 0, 0.0), (0.0, 0, 0.0), (0.02, 0, 0.0)]))


def sessions(rng: Random) -> Case:
    """Talks that go on, each turn beginning as the one before, of several tenants, on replicas with late loads."""
    size, ranks = 4, rng.choice([2, 3])
    spec = Spec(blocks=rng.choice([24, 60]), block_size=size, max_tokens=32, ranks=ranks, forwards_tokens=True)
    drawn: list[Request] = []
    for talk in range(rng.randint(4, 6)):
        at, length, own = round(rng.uniform(0, 0.1), 3), 0, rng.random() < 0.5
        for turn in range(rng.randint(2, 4)):
            length += size * rng.randint(1, 3)
            ids = tuple(1000 * (talk + 1 if own or chunk else 1) + chunk for chunk in range(length // size))
            about = {"session": f"talk {talk}", "tenant": "ab"[talk % 2], "hashes": ids, "hash_block": size}
            drawn.append(Request(0, at, length + rng.randint(0, 3), rng.randint(2, 8), **about))  # type: ignore[arg-type]
            at = round(at + 0.15, 3) if turn % 2 else round(at + 0.4, 3)
    drawn.sort(key=lambda one: one.arrival)
    requests = tuple(replace(one, id=id) for id, one in enumerate(drawn))
    return Case("sessions", spec, requests, reports=rng.choice([(0.0, 0, 0.0), (0.05, 0, 0.01)]))


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        tiny_pool,
        huge_prompt,
        burst,
        equal,
        priorities,
        aborts,
        prefixes,
        pipeline,
        stream,
        half_prefilled,
        misfits,
        replicas,
        lockstep,
        deadlines,
        ties,
        stale_loads,
        uneven,
        sessions,
    )
}
