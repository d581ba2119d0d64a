"""Projections with the small operations around them, put together from parts that know nothing of one another.

What a GPU does in one launch for few tokens is this for many, and on every other device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Norm = Callable[[Tensor, Tensor, float], Tensor]
Project = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor | None], Project]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """The operations to compose; each method is an operation of its own, as `kernels.reference` says."""

    rms_norm: Norm
    linear: Linear
    silu_mul: Activation

    def norm_linear(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Project:
        project = self.linear(weight, bias)
        return lambda x: project(self.rms_norm(x, norm, eps))

    def norm_gated(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Project:
        project = self.linear(weight, bias)
        return lambda x: self.silu_mul(project(self.rms_norm(x, norm, eps)))

    def add_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        project = self.linear(weight, bias)
        return lambda x, residual: residual.add_(project(x))
