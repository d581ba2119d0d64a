"""A cost model with another inside."""

from __future__ import annotations

from dataclasses import dataclass

from playground.sim.cost import Cost, CostModel, Shape


@dataclass(frozen=True, slots=True)
class Around:
    """Answers what the inner model does; whoever looks at a step in another way replaces `stage`."""

    cost: CostModel

    def stage(self, shape: Shape, stage: int) -> Cost:
        return self.cost.stage(shape, stage)

    def host(self, shape: Shape) -> float:
        return self.cost.host(shape)

    def transfer(self, shape: Shape) -> float:
        return self.cost.transfer(shape)

    def copy(self, blocks: int) -> float:
        return self.cost.copy(blocks)
