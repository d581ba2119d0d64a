"""The cost model of sheets and configs: each operator at the rate that the device achieves, nothing fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import NamedTuple

from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.shape import Shape
from playground.sim.device import Device

ATTENTION_TILE = 64
"""Half of the 128 queries or keys that attention kernels handle at a time: what a row loses to rounding on average.
It stands for the cost per row in H200 and RTX 4090 decode tables, and the poor efficiency of short chunks."""


class _Stage(NamedTuple):
    """Coefficients of one stage: seconds per what the name says."""

    linear_compute: float
    """Per token, rounded up to the GEMM tile."""
    linear_memory: float
    """Once: all weights of the layers."""
    activation: float
    """Per token: element-wise kernels and the KV write."""
    decode_compute: float
    """Per key read by a decode."""
    decode_memory: float
    prefill_compute: float
    """Per (query, key) pair."""
    prefill_memory: float
    """Per key read by a prefill."""
    latency: float
    """Once: start and drain of kernels."""
    eager: float
    """Once: launching the layers one by one."""
    reduce_latency: float
    """Once: all collectives."""
    reduce: float
    """Per token."""
    head_compute: float
    """Per sampled row, rounded up to the GEMM tile; 0 but on the last stage."""
    head_memory: float
    """Once if any row is sampled."""
    logits: float
    """Per sampled row: writing logits and reading them to sample."""
    gather: float
    """Per sampled row: collecting logits over the ranks."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """From a model's config and a device's sheet, with nothing fitted to end-to-end runs.

    `layers` says how many layers each stage holds (default: even over `stages`). Pure decodes of at most `graph_rows`
    rows replay a CUDA graph; all else is launched eagerly. `skew`: attention takes as if that share of the decodes
    were as long as the longest. Host times are those of an engine's scheduler and input preparation, never of the
    simulator's own.
    """

    model: ModelShape
    device: Device
    tp: int = 1
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    graph_rows: int = 256
    skew: float = 0.03
    host_base: float = 2e-4
    host_per_sequence: float = 3e-6
    _stages: tuple[_Stage, ...] = field(init=False, repr=False, compare=False)
    _transfer: float = field(init=False, repr=False, compare=False)
    _copy: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        layout = Layout.of(self.model, self.tp, self.stages, self.layers)
        layout.check_fits(self.device)
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "layers", layout.layers)
        keep(self, "stages", layout.stages)
        keep(self, "_stages", tuple(_coefficients(layout, self.device, stage) for stage in range(layout.stages)))
        keep(self, "_transfer", self.model.hidden * self.model.dtype_bytes / self.device.link)
        largest = max(layout.kv_bytes_per_token(stage) for stage in range(layout.stages))
        keep(self, "_copy", self.block_size * largest / self.device.host_link)

    def _check(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"cost.skew={self.skew} must lie in 0..1")
        if self.block_size < 1:
            raise ValueError(f"cost.block_size={self.block_size} must be at least 1")
        for name in ("graph_rows", "host_base", "host_per_sequence"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"cost.{name}={value} must be 0 or more")

    def stage(self, shape: Shape, stage: int) -> Cost:
        """One pass over the weights for all tokens, then attention, then (last stage) the head for sampled rows."""
        tokens, _, sampled, decodes, context, longest, pairs, prefix, _ = shape
        if not tokens:
            return IDLE
        one = self._stages[stage]
        tile = self.device.gemm_tile
        linear = one.linear_compute * (tokens if tokens <= tile else -(-tokens // tile) * tile)
        stream = one.linear_memory
        keys = context + self.skew * (decodes * longest - context) + ATTENTION_TILE * decodes
        decode_compute, decode_memory = one.decode_compute * keys, one.decode_memory * keys
        prefill_compute = one.prefill_compute * (pairs + ATTENTION_TILE * prefix)
        prefill_memory = one.prefill_memory * prefix
        activation = one.activation * tokens
        compute = linear + decode_compute + prefill_compute
        memory = stream + activation + decode_memory + prefill_memory
        kernels = one.latency + hypot(linear, stream) + activation
        kernels += decode_memory if decode_memory > decode_compute else decode_compute
        kernels += prefill_memory if prefill_memory > prefill_compute else prefill_compute
        communication = one.reduce_latency + one.reduce * tokens
        if sampled and one.head_memory:
            head = one.head_compute * (sampled if sampled <= tile else -(-sampled // tile) * tile)
            logits = one.logits * sampled
            compute += head
            memory += one.head_memory + logits
            kernels += hypot(head, one.head_memory) + logits
            communication += one.gather * sampled
        graph = tokens == decodes <= self.graph_rows
        return Cost(compute, memory, kernels, communication, self.device.graph_launch if graph else one.eager)

    def ticking(self, shape: Shape) -> Iterator[float]:
        """What `stage` says of stage 0 and `shape.tick(1)`, `shape.tick(2)`, ...: only what decodes read changes."""
        one, skew, decodes = self._stages[0], self.skew, shape.decodes
        fixed = self.stage(shape._replace(decode_context=0, decode_longest=0), 0)
        tile = self.device.gemm_tile
        linear = one.linear_compute * (decodes if decodes <= tile else -(-decodes // tile) * tile)
        before = one.latency + hypot(linear, one.linear_memory) + one.activation * decodes
        after = 0.0
        if shape.sampled and one.head_memory:
            head = one.head_compute * (shape.sampled if shape.sampled <= tile else -(-shape.sampled // tile) * tile)
            after = hypot(head, one.head_memory) + one.logits * shape.sampled
        rounding, each = ATTENTION_TILE * decodes, max(one.decode_compute, one.decode_memory)
        context, longest = shape.decode_context, shape.decode_longest
        host, communication = fixed.host, fixed.communication
        while True:
            context += decodes
            longest += 1
            kernels = before + each * (context + skew * (decodes * longest - context) + rounding) + after
            yield (kernels if kernels > host else host) + communication

    def host(self, shape: Shape) -> float:
        return self.host_base + self.host_per_sequence * shape.sequences

    def transfer(self, shape: Shape) -> float:
        """One hidden state per token; ranks of a tensor-parallel stage send to their peers over the same link."""
        return self.device.link_latency + self._transfer * shape.tokens

    def copy(self, blocks: int) -> float:
        return self.device.host_latency + self._copy * blocks if blocks else 0.0


def _coefficients(layout: Layout, device: Device, stage: int) -> _Stage:
    model, tp, layers = layout.model, layout.tp, layout.layers[stage]
    kv = layers * layout.kv_bytes_per_token_layer
    pair = layers * model.attention_flops / tp
    last = stage == layout.stages - 1
    head = _head(layout, device) if last else (0.0, 0.0, 0.0, 0.0)
    return _Stage(
        layers * model.linear_flops / tp / device.gemm_flops,
        layers * model.layer_bytes / tp / device.bandwidth,
        layers * _activation_bytes(layout) / device.bandwidth,
        pair / device.attention_flops,
        kv / device.bandwidth,
        pair / device.attention_flops,
        kv / device.bandwidth,
        (layers + last) * device.kernel_latency,
        (layers + last) * device.eager_launch,
        *_reduce(layout, device, layers),
        *head,
    )


def _activation_bytes(layout: Layout) -> float:
    """Of one token in one layer: gate and up read and their product written; two residual norms read and written,
    half of it from the cache; query, key and value read and written once for rotation and the KV write."""
    model = layout.model
    width = 3 * model.intermediate / layout.tp + 4 * model.hidden
    width += 2 * (model.heads // layout.tp + 2 * layout.kv_heads) * model.head_dim
    return width * model.dtype_bytes


def _reduce(layout: Layout, device: Device, layers: int) -> tuple[float, float]:
    """Latency and seconds per token of two all-reduces per layer; a ring moves 2 (tp-1)/tp of the data."""
    if layout.tp == 1:
        return 0.0, 0.0
    moved = 2 * (layout.tp - 1) / layout.tp * layout.model.hidden * layout.model.dtype_bytes
    return 2 * layers * device.link_latency, 2 * layers * moved / device.link


def _head(layout: Layout, device: Device) -> tuple[float, float, float, float]:
    """Per row, once, per row, per row. Logits are written in the model's dtype and read once in float32 to sample:
    the slope of vLLM's sampler on an RTX 4090, 0.74 us a row of 128,256 logits, is 5.5 bytes a logit."""
    model, tp = layout.model, layout.tp
    logits = model.vocabulary * (model.dtype_bytes + 4) / device.bandwidth
    gather = (tp - 1) / tp * model.vocabulary * model.dtype_bytes / device.link
    return model.head_flops / tp / device.gemm_flops, model.head_bytes / tp / device.bandwidth, logits, gather
