"""What is asked of a policy: each property in one line, how it is judged in a case, and in what it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import nan
from random import Random
from typing import Any, NamedTuple

from playground.check.case import Case, Make
from playground.check.plain import Plain
from playground.check.serving import Outcome, attend
from playground.core import Done, Request, Spec, Step
from playground.oracle import oracles

FEW = 1e-9


class Finding(NamedTuple):
    """A property in one case. `value` in the property's unit, nan where it has none; `problem` empty if it holds."""

    value: float = nan
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a policy may state otherwise.

    `passed`: steps in a row that may leave out a decode that is ready (None: 2 x steps that may be in flight + 4, what
    a first-come queue needs while its length changes). `preemptions` of one sequence. `waste`: tokens computed again
    for each that had to be. `share`: requests of the fullest replica over the mean. `pace`: time until the last end
    over that of a plain policy (`playground.check.plain`).
    """

    passed: int | None = None
    preemptions: int = 24
    waste: float = 4.0
    share: float = 1.5
    pace: float = 3.0


@dataclass(frozen=True, slots=True)
class Judging:
    """A case that was served, and the means to serve another."""

    case: Case
    outcome: Outcome
    make: Make
    limits: Limits

    def again(self, case: Case) -> Outcome:
        return attend(case, self.make)


@dataclass(frozen=True, slots=True)
class Property:
    """`judge` answers None where the case says nothing about it. `families`: in which cases it is asked; () in all."""

    name: str
    meaning: str
    unit: str
    judge: Callable[[Judging], Finding | None]
    families: tuple[str, ...] = ()
    fatal: bool = False
    """A failure ends the examination: each takes seconds, and there would be one in case after case."""


def judged(property: Property, case: Case, make: Make, limits: Limits) -> Finding | None:
    """The property in this case, which is served for it. Raises `Refused` as `attend` does."""
    return of_outcome(property, Judging(case, attend(case, make), make, limits))


def of_outcome(property: Property, judging: Judging) -> Finding | None:
    """The same where the case has been served."""
    if property.families and judging.case.family not in property.families:
        return None
    problem = judging.outcome.problem
    if problem:
        return Finding(problem=problem.what) if problem.property == property.name else None
    return property.judge(judging)


def _whole(judging: Judging) -> Finding:
    """What is looked for while the case is served: it was."""
    return Finding()


# --- numbers of one run


def _preemption(judging: Judging) -> Finding:
    most = judging.outcome.seen.preemptions.most_common(1)
    id, count = most[0] if most else (-1, 0)
    bound = judging.limits.preemptions
    return Finding(count, f"sequence {id} lost its KV {count} times, {bound} are allowed" if count > bound else "")


def _waste(judging: Judging) -> Finding:
    """Tokens computed again, by those that the answers needed."""
    sequences = [ended.sequence for ended in judging.outcome.ended.values()]
    again = sum(sequence.recomputed for sequence in sequences)
    needed = sum(one.request.prompt_length + one.returned - 1 for one in sequences if one.returned)
    if not needed:
        return Finding(0.0)
    ratio, bound = again / needed, judging.limits.waste
    return Finding(ratio, f"{again} tokens were computed again for {needed} needed" if ratio > bound else "")


def _starvation(judging: Judging) -> Finding:
    passed, limit = judging.outcome.seen.passed, judging.outcome.limit
    bound = judging.limits.passed
    bound = 2 * limit + 4 if bound is None else bound
    if passed.steps <= bound:
        return Finding(passed.steps)
    what = f"sequence {passed.sequence} was ready to decode and {passed.steps} steps in a row served others"
    return Finding(passed.steps, f"{what} (until {passed.until:g} s); {bound} are allowed")


def _conservation(judging: Judging) -> Finding:
    return Finding(judging.outcome.seen.held, judging.outcome.seen.idle)


def _hits(judging: Judging) -> Finding:
    """Each prefix is somebody else's, or it is no hit."""
    counts = Counter(id for request in judging.case.requests for id in set(request.hashes))
    for request in judging.case.requests:
        shared = sum(counts[id] > 1 for id in request.hashes) * request.hash_block
        ended = judging.outcome.ended.get(request.id)
        if ended and ended.sequence.cached_tokens > shared:
            got = ended.sequence.cached_tokens
            return Finding(got - shared, f"request {request.id} counts {got} tokens as hits and shares {shared}")
    return Finding(0.0)


def _shares(judging: Judging) -> Finding | None:
    """The fullest replica's requests over the mean."""
    routes = Counter(judging.outcome.seen.routes)
    ranks = judging.case.spec.ranks
    if ranks == 1 or routes.total() < 4 * ranks:  # of few, one replica may well have most
        return None
    most = max(routes.values())
    share = most * ranks / routes.total()
    counts = ", ".join(str(routes[rank]) for rank in range(ranks))
    return Finding(share, f"replicas got {counts} of equal requests" if share > judging.limits.share else "")


def _fuller(judging: Judging) -> Finding | None:
    """Of those that came after the first: how many went to where that one is, over the mean."""
    first, *others = judging.outcome.seen.routes or [0]
    ranks = judging.case.spec.ranks
    if len(others) < 4 * ranks:
        return None
    share = others.count(first) * ranks / len(others)
    told = f"{others.count(first)} of {len(others)} went to the replica that has a long one already"
    return Finding(share, told if share > judging.limits.share else "")


def _pace(judging: Judging) -> Finding | None:
    """When the last request ends, by when it does under a plain policy."""
    plain = attend(judging.case, Plain)
    if plain.problem or not judging.outcome.ended:  # more run ahead than a plain policy knows of
        return None
    took, least = (max(one.finished for one in run.ended.values()) for run in (judging.outcome, plain))
    ratio, bound = took / max(least, FEW), judging.limits.pace
    told = f"the last request ends at {took:g} s, under a plain policy at {least:g} s"
    return Finding(ratio, told if ratio > bound else "")


PATIENT = 1.0
"""Seconds to the first token, and from each to the next, within which anybody alone in a system is served."""


def _welcome(judging: Judging) -> Finding | None:
    """Of those turned away: had anybody got tokens, or would have who is alone, fits, and is in no hurry?"""
    case = judging.case
    turned = [one for one in judging.outcome.ended.values() if one.outcome == "rejected"]
    for ended in turned:
        if got := ended.sequence.returned:
            return Finding(problem=f"request {ended.sequence.id} is turned away after {got} tokens: {ended.why}")
    could = [
        one
        for one in (ended.request for ended in turned)
        if _fits(one, case.spec) and min(one.slo.ttft, one.slo.tpot, one.slo.e2el) >= PATIENT
    ]
    for request in could[:2]:
        alone = judging.again(replace(case, requests=(replace(request, arrival=0.0),), aborts=()))
        end = alone.ended.get(request.id)
        if end is not None and end.outcome == "rejected":
            return Finding(problem=f"request {request.id} is turned away though it is alone and fits: {end.why}")
    return Finding()


def _fits(request: Request, spec: Spec) -> bool:
    """Also where prompts are not cut."""
    total = request.prompt_length + request.max_tokens
    whole = request.prompt_length <= spec.max_tokens and total <= spec.max_length
    return whole and spec.blocks_for(total) <= spec.blocks


# --- priorities


def _priority(judging: Judging) -> Finding | None:
    if not (direction := _direction(judging)):
        return None
    return Finding(problem=judging.outcome.seen.inversions.get(direction, ""))


def _direction(judging: Judging) -> int:
    """Who goes first: 1 the higher priority, -1 the lower, 0 neither is asked for."""
    first = [_first_served(judging, ranks) for ranks in ((0, 1), (1, 0))]
    return {(1, 0): 1, (0, 1): -1}.get((first[0], first[1]), 0)


def _first_served(judging: Judging, ranks: tuple[int, int]) -> int:
    requests = tuple(Request(id, 0.0, 4, 4, priority=rank) for id, rank in enumerate(ranks))
    outcome = judging.again(Case("priorities", Spec(blocks=200, block_size=4, max_seqs=1), requests))
    return next((step.columns.sequence[0] for step in outcome.steps if step.columns.sequence), -1)


# --- several runs compared


def _decided(entry: Step) -> tuple[Any, ...]:
    """All of a step that a policy chose: not the requests that come along, which a backend needs."""
    return entry.planned, entry.group, entry.columns, entry.copies, entry.dummies, entry.repeat, entry.move


def _determinism(judging: Judging) -> Finding:
    again = judging.again(judging.case)
    pairs = zip(judging.outcome.steps, again.steps, strict=False)
    for number, (one, other) in enumerate(pairs):
        if _decided(one) != _decided(other):
            return Finding(problem=f"the same run again decides otherwise at step {number}")
    if len(again.steps) != len(judging.outcome.steps) or again.events != judging.outcome.events:
        return Finding(problem="the same run again has other events")
    return Finding()


def _steady(judging: Judging) -> Finding:
    """Where the policy's promises are believed, requests end at the same times with the same tokens."""
    case = judging.case
    merged = judging.again(replace(case, spec=replace(case.spec, repeats=True)))
    if merged.problem:
        return Finding(problem=f"with quiet stretches in one go: {merged.problem.what}")
    for id, ended in judging.outcome.ended.items():
        other = merged.ended[id]
        if abs(other.finished - ended.finished) > FEW or other.sequence.preemptions != ended.sequence.preemptions:
            told = f"request {id} ends at {ended.finished:g} s, and at {other.finished:g} s"
            return Finding(problem=f"{told} where quiet stretches are done in one go: `steady` promises too much")
    return Finding()


def _permutation(judging: Judging) -> Finding:
    """Other numbers for the same requests decide nothing; another order of equal arrivals costs little."""
    case = judging.case
    if case.family == "equal":
        return _renamed(judging)
    order = list(case.requests)
    Random(case.seed + 1).shuffle(order)
    shuffled = tuple(replace(one, id=id) for id, one in enumerate(order))
    other = judging.again(replace(case, requests=shuffled))
    if other.problem:
        return Finding(problem=f"with equal arrivals in another order: {other.problem.what}")
    ratio = max(other.repeated, 1) / max(judging.outcome.repeated, 1)
    ratio = max(ratio, 1 / ratio)
    told = f"{judging.outcome.repeated} steps, and {other.repeated} with equal arrivals in another order"
    return Finding(ratio, told if ratio > 2 and abs(other.repeated - judging.outcome.repeated) > 10 else "")


def _renamed(judging: Judging) -> Finding:
    names = {one.id: 7 * place + Random(place).randint(3, 9) for place, one in enumerate(judging.case.requests)}
    requests = tuple(replace(one, id=names[one.id]) for one in judging.case.requests)
    other = judging.again(replace(judging.case, requests=requests))
    if other.problem:
        return Finding(problem=f"with other ids: {other.problem.what}")
    for number, (one, renamed) in enumerate(zip(judging.outcome.steps, other.steps, strict=False)):
        mine = tuple(names[id] for id in one.columns.sequence), one.columns[2:6]
        if mine != (renamed.columns.sequence, renamed.columns[2:6]):
            return Finding(problem=f"step {number} is another when equal requests have other ids")
    return Finding(1.0)


def _oracle(judging: Judging) -> Finding | None:
    """Answers that turn out otherwise change nothing before the first of them has ended."""
    if oracles(judging.make()):
        return None
    case = judging.case
    longer = tuple(replace(one, output_length=_another(one)) for one in case.requests)
    other = judging.again(replace(case, requests=longer))
    for number, (one, two) in enumerate(zip(judging.outcome.log, other.log, strict=False)):
        if isinstance(one, Done) and isinstance(two, Done):
            if one.ended != two.ended:
                return Finding()
        elif isinstance(one, Step) and isinstance(two, Step):
            if _decided(one) != _decided(two):
                what = f"entry {number} of the log, step {one.id}, depends on how long answers will be"
                return Finding(problem=f"{what}, before any of them has ended")
        else:
            return Finding(problem=f"entry {number} of the log depends on how long answers will be")
    return Finding()


def _another(request: Request) -> int:
    """A length of the answer that is allowed as well."""
    known = request.output_length or request.max_tokens
    return request.max_tokens if known < request.max_tokens else max(request.max_tokens // 2, 1)


# --- all of them

PROPERTIES = (
    Property("errors", "The policy raises nothing.", "", _whole),
    Property("returns", "Every decision comes to an end.", "", _whole, fatal=True),
    Property("stall", "While work waits something is placed, or is due, or a wake is set.", "", _whole),
    Property("ends", "Every request ends: finished with its tokens, or turned away with a reason.", "", _whole),
    Property("blocks", "No KV block is lost, used by two, or freed while it is in use.", "", _whole),
    Property("limits", "No step exceeds its tokens, no rank its seats, no group its steps in flight.", "", _whole),
    Property("tokens", "Each token is computed once unless its KV was given up, and from known ones.", "", _whole),
    Property("preemption", "No sequence loses its KV again and again.", "times, the worst sequence", _preemption),
    Property("waste", "Few tokens are computed again.", "tokens again a token needed", _waste),
    Property(
        "starvation",
        "A decode that is ready, with memory for it, is not passed over for long.",
        "steps, the worst gap",
        _starvation,
        ("huge_prompt", "stream", "pipeline"),
    ),
    Property(
        "pace",
        "Not much longer than a plain policy takes.",
        "times a plain policy's time",
        _pace,
        (
            "tiny_pool",
            "huge_prompt",
            "burst",
            "equal",
            "priorities",
            "prefixes",
            "pipeline",
            "stream",
            "half_prefilled",
            "replicas",
            "lockstep",
            "deadlines",
            "sessions",
        ),
    ),
    Property(
        "welcome", "Who fits and is in no hurry is served when alone; who has got tokens gets the rest.", "", _welcome
    ),
    Property("conservation", "No device idles over waiting work without a `wake`.", "s held by wakes", _conservation),
    Property("determinism", "The same run again decides the same.", "", _determinism),
    Property(
        "permutation",
        "Equal arrivals in another order, or under other ids, change nothing that matters.",
        "times as many steps",
        _permutation,
        ("equal", "burst", "half_prefilled"),
    ),
    Property("steady", "Quiet stretches promised by `steady` in one go are what stepping gives.", "", _steady),
    Property("oracle", "Decisions do not depend on how long answers will turn out.", "", _oracle),
    Property(
        "priority",
        "Who goes by priority starts nobody, and keeps nobody, at the cost of a better one.",
        "",
        _priority,
        ("priorities",),
    ),
    Property("hits", "Only prefixes that others have count as cache hits.", "tokens too many", _hits, ("prefixes",)),
    Property("ties", "Replicas that are alike get alike.", "times the mean share", _shares, ("ties",)),
    Property(
        "fuller",
        "The replica that has most gets no more than the others.",
        "times the mean share",
        _fuller,
        ("uneven",),
    ),
    Property(
        "stale_loads",
        "Old loads do not send everybody to one replica.",
        "times the mean share",
        _shares,
        ("stale_loads",),
    ),
)


def named(names: Iterable[str]) -> tuple[Property, ...]:
    """Those of these names, in the usual order. `ValueError` for an unknown one."""
    wanted = list(names)
    known = [property.name for property in PROPERTIES]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--only {name}: no such property; there are {', '.join(known)}")
    return tuple(property for property in PROPERTIES if property.name in wanted)
