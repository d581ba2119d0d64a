"""The cost model of examples worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.shape import Shape


@dataclass(frozen=True, slots=True)
class Linear:
    """Every stage takes base + per_token * tokens + per_context * keys read: for examples worked by hand.

    `Linear(0.01)` is a step of fixed length. All in seconds. Nothing is said about compute and memory apart: both
    are taken to be busy all the time.
    """

    base: float
    per_token: float = 0.0
    per_context: float = 0.0
    host_base: float = 0.0
    host_per_sequence: float = 0.0
    per_transfer: float = 0.0
    per_block: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"cost.{name}={value} must be 0 or more seconds")

    def stage(self, shape: Shape, stage: int) -> Cost:
        if not shape.tokens:
            return IDLE
        context = shape.decode_context + shape.prefill_context
        busy = self.base + self.per_token * shape.tokens + self.per_context * context
        return Cost(busy, busy, busy, 0.0, 0.0)

    def host(self, shape: Shape) -> float:
        return self.host_base + self.host_per_sequence * shape.sequences

    def transfer(self, shape: Shape) -> float:
        return self.per_transfer

    def copy(self, blocks: int) -> float:
        return self.per_block * blocks
