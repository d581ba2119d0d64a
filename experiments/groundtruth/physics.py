"""The least time that a step can take on a device, by its sheet alone: no prediction may be shorter."""

from __future__ import annotations

from dataclasses import dataclass

from playground.model import ModelShape
from playground.sim.cost import Cost, CostModel, Shape
from playground.sim.device import Device

SLACK = 1 - 1e-9
"""For rounding."""


class BeatsPhysics(AssertionError):
    """A predicted step is shorter than the sheet's FLOP/s and bytes/s allow."""


def floor(model: ModelShape, device: Device, tp: int, shape: Shape) -> float:
    """Seconds: FLOPs at the sheet's peak or bytes at its bandwidth, whichever takes longer, evenly over `tp` devices.

    Counted: products with the weights, attention, the head of sampled rows; weights and KV read once.
    """
    if not shape.tokens:
        return 0.0
    keys = shape.decode_context + shape.prefill_pairs
    flops = model.layers * (model.linear_flops * shape.tokens + model.attention_flops * keys)
    flops += model.head_flops * shape.sampled
    moved = model.layers * model.linear_weights * model.dtype_bytes
    moved += model.head_bytes if shape.sampled else 0
    moved += model.kv_bytes_per_token * (shape.decode_context + shape.prefill_context)
    return max(flops / device.peak_flops, moved / device.memory_bandwidth) / tp


@dataclass(frozen=True, slots=True)
class Held:
    """A cost model of one stage that is held to physics at every step; it answers what the inner one does."""

    cost: CostModel
    model: ModelShape
    device: Device
    tp: int

    def stage(self, shape: Shape, stage: int) -> Cost:
        cost = self.cost.stage(shape, stage)
        least = floor(self.model, self.device, self.tp, shape)
        if cost.device_time < least * SLACK:
            raise BeatsPhysics(
                f"{self.device.name}, tp={self.tp}: {cost.device_time * 1e3:.3f} ms predicted for {shape}, which "
                f"takes at least {least * 1e3:.3f} ms"
            )
        return cost

    def host(self, shape: Shape) -> float:
        return self.cost.host(shape)

    def transfer(self, shape: Shape) -> float:
        return self.cost.transfer(shape)

    def copy(self, blocks: int) -> float:
        return self.cost.copy(blocks)
