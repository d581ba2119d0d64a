"""A mixture of experts in place of the MLP: a router, the experts it picks, and those that all tokens share.

Qwen2-MoE has shared experts with a gate before them, DeepSeek has some without, Qwen3-MoE has none. It does not know
which rank has which experts, nor how tokens get there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.config import Routing
from engine.models.passing import Passing, Pending
from engine.models.routing import Router, pick_experts
from engine.weights import ExpertWeights, Linear
from kernels.registry import Ops

Add = Callable[[Tensor, Tensor], Tensor]
"""Of normed hidden states y and a residual x, both [T, hidden]: x + f(y), which overwrites x."""


class Routed(NamedTuple):
    """Tokens, and the experts picked for them."""

    y: Tensor
    """Normed hidden states, [T, hidden]."""
    shares: Tensor
    """[T, active] float32."""
    picks: Tensor
    """Ids of the model's experts, [T, active] int32; who is not one of them is nobody."""


class Trip(Protocol):
    """The way of one pass's tokens to the experts on other ranks and back, layer by layer."""

    def go(self, routed: Routed) -> Pending[Routed]:
        """What this rank's experts are to see of all ranks' tokens."""
        ...

    def come(self, sums: Tensor) -> Pending[Tensor]:
        """From what they add to each of those, to what is added to each of one's own; a share of it in a team."""
        ...


class Mixture:
    """One layer's; weights are those of one rank."""

    def __init__(
        self,
        experts: ExpertWeights,
        gate_up: Linear | None,
        down: Linear | None,
        ops: Ops,
        routing: Routing | None,
        held: Tensor | None = None,
    ) -> None:
        """`held` [experts of the model] int32: where each is in the weights, -1: elsewhere; None: all are here."""
        if routing is None:
            raise ValueError("routing=None: a layer has experts; take the routing from the model's config")
        self._mix = ops.experts(experts.gate_up, experts.down, held)
        self._pick = _picker(experts, ops, routing)
        self._shared = None if gate_up is None or down is None else shared(gate_up, down, experts.shared_gate, ops)

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """x + the experts that are here of y, both [T, hidden]; overwrites x."""
        x = self._mix(y, *self._pick(y), x)
        return x if self._shared is None else self._shared(y, x)

    def passing(self, y: Tensor, trip: Trip) -> Passing:
        """What all experts, wherever they are, add to y [T, hidden], or this rank's share of it if it is in a team.

        Shared experts are computed while tokens are on their way to the others.
        """
        leaving = trip.go(Routed(y, *self._pick(y)))
        yield
        own = y.new_zeros(y.shape)
        if self._shared is not None and len(y):
            own = self._shared(y, own)
        met = leaving()
        returning = trip.come(self._mix(*met, met.y.new_zeros(met.y.shape)))
        yield
        return own.add_(returning())


def _picker(experts: ExpertWeights, ops: Ops, routing: Routing) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From normed hidden states to shares and picks."""
    if (grouped := routing.grouped) is not None:
        router, correction = Router(experts.router), experts.correction
        return lambda y: pick_experts(router(y), routing, grouped, correction)
    score = ops.linear(experts.router, None)
    return lambda y: ops.route(score(y), routing.active, routing.normalise)


def shared(gate_up: Linear, down: Linear, gate: Tensor | None, ops: Ops) -> Add:
    """The experts of all tokens, as one MLP, behind a gate that lets a share of it through."""
    widen, narrow = ops.linear(*gate_up), ops.add_linear(*down)
    if gate is None:
        return lambda y, x: narrow(ops.silu_mul(widen(y)), x)
    share = ops.linear(gate, None)
    # What the gate lets through of the sum is the sum of what it lets through: [T, 1] times [T, width].
    return lambda y, x: narrow(ops.silu_mul(widen(y)).mul_(share(y).sigmoid_()), x)
