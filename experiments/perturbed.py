"""Deliberate errors: step times and visible output lengths that are wrong by a known amount."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import Any

from playground.core import Arrive
from playground.sim.cost import Cost, CostModel, Shape
from playground.workload.source import Event, Source


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of step times: 0.1 is 10 % too long, negative is too short.

    `prefill`: of steps with prefills; `decode`: of the others; `scatter`: of each shape, up to so much either way, the
    same whenever the shape comes again, drawn with `seed`.
    """

    prefill: float = 0.0
    decode: float = 0.0
    scatter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if (value := getattr(self, name)) <= -1:
                raise ValueError(f"errors.{name}={value} must be above -1: no step takes less than no time")
        if not 0 <= self.scatter < 1:
            raise ValueError(f"errors.scatter={self.scatter} must lie in [0, 1)")


@dataclass(frozen=True, slots=True)
class Perturbed:
    """A cost model whose steps take longer or shorter than the inner one says."""

    cost: CostModel
    errors: Errors

    def stage(self, shape: Shape, stage: int, *pooled: int) -> Cost:
        factor = self._factor(shape)
        return Cost(*[seconds * factor for seconds in self.cost.stage(shape, stage, *pooled)])

    def host(self, shape: Shape) -> float:
        return self.cost.host(shape) * self._factor(shape)

    def transfer(self, shape: Shape) -> float:
        return self.cost.transfer(shape) * self._factor(shape)

    def copy(self, blocks: int) -> float:
        return self.cost.copy(blocks)

    def _factor(self, shape: Shape) -> float:
        errors = self.errors
        factor = 1 + (errors.decode if shape.tokens == shape.decodes else errors.prefill)
        if not errors.scatter:
            return factor
        # Of batch and context in steps of a tenth: one table entry, one error.
        place = shape.tokens, round(shape.decode_context * 10 / max(1, shape.decodes) / 256), shape.prefill_context
        return factor * (1 + errors.scatter * Random(hash((errors.seed, *place))).uniform(-1, 1))


def perturbed(
    inner: Callable[..., CostModel],
    prefill: float = 0.0,
    decode: float = 0.0,
    scatter: float = 0.0,
    seed: int = 0,
    **given: Any,
) -> Perturbed:
    """What a `backend.cost._target_` names: `inner` makes the cost model that is then made wrong."""
    return Perturbed(inner(**given), Errors(prefill, decode, scatter, seed))


class Overstated:
    """A source whose requests show more `max_tokens` than will come: up to `error` too many (1: twice as many).

    What admission rules and orders by expected length go by. It is a limit as well, so that it cannot be too low.
    """

    def __init__(self, source: Source, error: float, seed: int) -> None:
        if error < 0:
            raise ValueError(f"error={error} must be 0 or more: fewer tokens would cut the answers")
        self._source = source
        self._error = error
        self._rng = Random(seed)

    @property
    def total(self) -> int | None:
        return self._source.total

    def due(self) -> float:
        return self._source.due()

    def take(self, now: float) -> list[Event]:
        return [self._overstate(event) for event in self._source.take(now)]

    def finished(self, request_id: int, now: float) -> None:
        self._source.finished(request_id, now)

    def _overstate(self, event: Event) -> Event:
        if not isinstance(event, Arrive):
            return event
        request = event.request
        shown = ceil(request.max_tokens * (1 + self._error * self._rng.random()))
        return Arrive(replace(request, max_tokens=shown, output_length=request.output_length or request.max_tokens))
