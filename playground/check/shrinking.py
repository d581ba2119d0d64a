"""Makes a failing case smaller while it goes on failing: delta debugging over requests, then over every number.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from playground.check.case import Case
from playground.core import Request

PATIENCE = 60_000
"""Tokens of the cases that are tried, at most: some hundred small ones, or some dozen larger."""


def shrink(case: Case, fails: Callable[[Case], bool], patience: int = PATIENCE) -> Case:
    """The smallest case found that fails as well; of equal inputs always the same."""
    left = patience
    while left > 0:
        for smaller in _smaller(case):
            left -= smaller.tokens
            if fails(smaller):
                case = smaller
                break
            if left <= 0:
                return case
        else:
            return case
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first."""
    for requests in _fewer(case.requests):
        yield _with(case, requests)
    for place in range(len(case.aborts)):
        yield replace(case, aborts=case.aborts[:place] + case.aborts[place + 1 :])
    yield from _plainer(case)
    for place, request in enumerate(case.requests):
        for changed in _simpler(request):
            yield replace(case, requests=(*case.requests[:place], changed, *case.requests[place + 1 :]))


def _fewer(requests: Sequence[Request]) -> Iterator[tuple[Request, ...]]:
    """Without a half, a quarter, ... one of them."""
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            kept = (*requests[:start], *requests[start + size :])
            if kept:
                yield kept
        size //= 2


def _with(case: Case, requests: tuple[Request, ...]) -> Case:
    ids = {request.id for request in requests}
    return replace(case, requests=requests, aborts=tuple(abort for abort in case.aborts if abort[1] in ids))


def _plainer(case: Case) -> Iterator[Case]:
    plain = {"run_ahead": None, "per_token": 0.0, "reports": (0.0, 0, 0.0)}
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})  # type: ignore[arg-type]
    spec = case.spec
    for name in ("stages", "ranks"):
        if (value := getattr(spec, name)) > 1:
            yield replace(case, spec=replace(spec, **{name: value - 1}))
    for name in ("forwards_tokens", "lockstep", "host_blocks"):
        if getattr(spec, name):
            yield replace(case, spec=replace(spec, **{name: type(getattr(spec, name))(0)}))


def _simpler(request: Request) -> Iterator[Request]:
    if request.hashes:
        yield replace(request, hashes=())
    for prompt in _less(request.prompt_length):
        yield replace(request, prompt_length=prompt, hashes=request.hashes[: -(-prompt // request.hash_block)])
    if request.output_length not in (None, request.max_tokens):
        yield replace(request, max_tokens=request.output_length or 1)
    for most in _less(request.max_tokens):
        yield replace(request, max_tokens=most, output_length=min(request.output_length or most, most))
    if request.arrival:
        yield replace(request, arrival=0.0)


def _less(number: int) -> Iterator[int]:
    """1, a half, one less."""
    yield from sorted({1, number // 2, number - 1} - {0, number})
