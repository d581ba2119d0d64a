"""A mixture of experts in place of the MLP: a router, the experts it picks, and those that all tokens share.

Qwen2-MoE has shared experts with a gate before them, DeepSeek has some without, Qwen3-MoE has none. It does not know
which rank has which experts.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.config import Routing
from engine.models.routing import Router, pick_experts
from engine.weights import ExpertWeights, Linear
from kernels.registry import Ops

Add = Callable[[Tensor, Tensor], Tensor]
"""Of normed hidden states y and a residual x, both [T, hidden]: x + f(y), which overwrites x."""


def mixture(
    experts: ExpertWeights, gate_up: Linear | None, down: Linear | None, ops: Ops, routing: Routing | None
) -> Add:
    """The routed experts, and the shared ones if there are any."""
    if routing is None:
        raise ValueError("routing=None: a layer has experts; take the routing from the model's config")
    if gate_up is None or down is None:
        return routed(experts, ops, routing)
    own, common = routed(experts, ops, routing), shared(gate_up, down, experts.shared_gate, ops)
    return lambda y, x: common(y, own(y, x))


def routed(experts: ExpertWeights, ops: Ops, routing: Routing) -> Add:
    """The experts that a router picks for each token."""
    mix = ops.experts(experts.gate_up, experts.down, None)
    pick = _picker(experts, ops, routing)
    return lambda y, x: mix(y, *pick(y), x)


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
