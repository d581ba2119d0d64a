"""Seconds of a step's kernels by operator, wherever they were measured, for cost models that look them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Bounds, Curve


class Attention(Protocol):
    """Attention of one layer."""

    def seconds(self, shape: Shape) -> float:
        """`BeyondTable` if the shape lies outside of what was measured."""
        ...


@dataclass(frozen=True, slots=True)
class Operators:
    """Everything but attention, by tokens or sampled rows."""

    layer: Curve | None
    """Of one layer with an MLP, per tokens; None: no layer has one."""
    sparse: Curve | None
    """Of one layer with experts, all but these, per tokens; None: no layer has any."""
    routed: Curve | None
    """Of its experts, per tokens of all ranks that pool theirs for them."""
    first: Curve
    """The embedding."""
    last: Curve
    """The final norm."""
    head: Curve
    """Language-model head and sampler, per sampled rows."""

    @property
    def most(self) -> int:
        """Tokens up to which all of them were measured."""
        return min([curve.most for curve in (self.layer, self.sparse) if curve])

    def with_mlp(self, tokens: int) -> float:
        """Seconds of one layer that has an MLP."""
        return self.layer.at(tokens) if self.layer else 0.0

    def with_experts(self, tokens: int, pooled: int) -> float:
        """Seconds of one layer that has experts, for `pooled` tokens of all ranks that share these."""
        return self.sparse.at(tokens) + self.routed.at(pooled) if self.sparse and self.routed else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One model's operators on one device."""

    operators: Operators
    attention: Mapping[int | None, Attention]
    """By window; a lone entry stands for all layers."""
    bounds: Bounds
    reduce: Curve | None = None
    """One sum over tensor-parallel devices, per tokens; None: not measured."""


def total(curves: Sequence[Curve]) -> Curve:
    first, *more = curves
    for curve in more:
        first = first + curve
    return first
