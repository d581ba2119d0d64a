"""The oracle boundary: the only way by which a part of a policy learns how long answers will be.

What policies are shown (`Draft`, `RequestView`, `ClusterView`) knows of no true output length. A scheduler tells it to
those parts of its policy whose class derives from `Oracle`, and to nobody else; names of such classes begin with
`Oracle`, so that a configuration shows who cheats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from playground.core import Request


class LengthUnknown(ValueError):
    """An oracle was asked of a request whose length nobody knows: one line that says what to choose."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the true output length, in tokens, of every request that has arrived and not ended."""

    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("Oracle"):
            raise TypeError(f"{cls.__name__} derives from Oracle: its name must say so, as Oracle{cls.__name__}")

    def length(self, request: int) -> int:
        """Tokens that the answer to this request will have; LengthUnknown for one that nobody told it of."""
        try:
            return self._lengths[request]
        except KeyError:
            raise LengthUnknown(
                f"{type(self).__name__} was not told of request {request}: the scheduler finds oracles among the "
                "fields of its policy's parts, and tells them of requests that have arrived and not ended"
            ) from None

    def learn(self, request: Request) -> None:
        """It arrives. LengthUnknown if the workload does not know how long its answer will be."""
        if request.output_length is None:
            raise LengthUnknown(
                f"{type(self).__name__} needs true output lengths, and request {request.id} has none: "
                "choose a workload that knows them, or a predictor that is no oracle"
            )
        self._lengths[request.id] = request.output_length

    def forget(self, request: int) -> None:
        """It has ended."""
        self._lengths.pop(request, None)


def oracles(policy: object) -> tuple[Oracle, ...]:
    """Those that a policy is made of: itself, its fields and attributes, and theirs, each once."""
    found: list[Oracle] = []
    seen: set[int] = set()
    ahead = [policy]
    while ahead:
        part = ahead.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Oracle):
            found.append(part)
        ahead += _inside(part)
    return tuple(found)


def _inside(part: Any) -> Iterator[object]:
    if isinstance(part, type):
        return
    if isinstance(part, list | tuple):
        yield from part
    elif isinstance(part, Mapping):
        yield from part.values()
    elif is_dataclass(part):
        yield from (getattr(part, one.name, None) for one in fields(part))
    elif type(part).__module__ != "builtins":
        yield from getattr(part, "__dict__", {}).values()
