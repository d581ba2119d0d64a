"""The least time that a step can take on a device, by its sheet alone: no prediction may be shorter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from experiments.groundtruth.around import Around
from playground.model import ModelShape
from playground.sim.cost import Cost, Shape
from playground.sim.device import Device

SLACK = 1 - 1e-9
"""For rounding."""


class BeatsPhysics(AssertionError):
    """A predicted step is shorter than the sheet's FLOP/s and bytes/s allow."""


class Floor(NamedTuple):
    """Seconds that a step takes at the least: compute or memory, whichever takes longer."""

    token: float
    """Compute of one token in the weights."""
    decode: float
    """Compute of one key that a decode reads."""
    pair: float
    """Compute of one (query, key) pair of a prefill."""
    head: float
    """Compute of one sampled row."""
    weights: float
    """Memory, once."""
    table: float
    """Memory, once if any row is sampled."""
    key: float
    """Memory, of one key read."""

    @classmethod
    def of(cls, model: ModelShape, device: Device, tp: int) -> Floor:
        """At the sheet's peak FLOP/s and bandwidth, evenly over `tp` devices.

        Of routed experts each token meets `active`, and no fewer than these are read. Windows hide keys: layers that
        have one count without attention.
        """
        full = sum(model.window(layer) is None for layer in range(model.layers))
        matrices, moved = _weights(model)
        eight_bit = model.precision.eight_bit_weights or model.precision.eight_bit_experts
        products = tp * ((eight_bit and device.eight_bit_flops) or device.peak_flops)
        peak, bandwidth = tp * device.peak_flops, tp * device.memory_bandwidth
        return cls(
            2 * matrices / products,
            full * model.decode_flops / peak,
            full * model.attention_flops / peak,
            model.head_flops / peak,
            moved / bandwidth,
            model.head_bytes / bandwidth,
            full * model.kv_bytes_per_token_layer / bandwidth,
        )

    def seconds(self, shape: Shape) -> float:
        if not shape.tokens:
            return 0.0
        compute = self.token * shape.tokens + self.head * shape.sampled
        compute += self.decode * shape.decode_context + self.pair * shape.prefill_pairs
        memory = self.weights + self.key * (shape.decode_context + shape.prefill_context)
        return max(compute, memory + self.table if shape.sampled else memory)


def _weights(model: ModelShape) -> tuple[float, float]:
    """Matrix elements that a token meets in all layers, and their bytes."""
    own, precision = model.dtype_bytes, model.precision
    dense = (model.layers - model.expert_layers) * model.linear_weights
    dense += model.expert_layers * (model.attention_weights + model.common_weights)
    routed = model.expert_layers * model.expert_weights * (model.experts.active if model.experts else 0)
    return dense + routed, dense * precision.weight_bytes(own) + routed * precision.expert_bytes(own)


@dataclass(frozen=True, slots=True)
class Held(Around):
    """A cost model of one stage that is held to physics at every step; it answers what the inner one does."""

    least: Floor

    def stage(self, shape: Shape, stage: int) -> Cost:
        cost = self.cost.stage(shape, stage)
        if cost.device_time < (least := self.least.seconds(shape)) * SLACK:
            raise BeatsPhysics(
                f"{cost.device_time * 1e3:.3f} ms predicted for {shape}, which takes at least {least * 1e3:.3f} ms"
            )
        return cost
