"""What of a model lies on which device, and how many KV blocks fit beside it.

Sizes only: it does not know how long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playground.model import ModelShape
from playground.sim.device import Device

RESERVE_BYTES = 1.5 * 2**30
"""Context, workspace and activations. vLLM 0.19 left 1.69e9 bytes beside weights and KV of Llama-3.1-8B on an
RTX 4090 at 0.9 (2588 blocks); this default predicts 2627. It grows with the step's token limit: measure where it
matters, and cap `kv.blocks` to what the real engine reports."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is cut: every stage holds `layers[stage]` consecutive layers, cut again over `tp` ranks."""

    model: ModelShape
    tp: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_tp(self.model, self.tp)
        _check_layers(self.model, self.layers)

    @classmethod
    def of(cls, model: ModelShape, tp: int = 1, stages: int = 1, layers: Sequence[int] | None = None) -> Layout:
        """With `layers` where they are given (`stages` may then be left out), else an even split."""
        if layers is None:
            return cls(model, tp, even_layers(model.layers, stages))
        if stages not in (1, len(layers)):
            raise ValueError(f"stages={stages} but layers={list(layers)} name {len(layers)}; give one of the two")
        return cls(model, tp, tuple(layers))

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def kv_heads(self) -> int:
        """KV heads on one rank: with more ranks than heads each head is held several times."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer on one rank."""
        return 2 * self.kv_heads * self.model.head_dim * self.model.dtype_bytes

    def kv_bytes_per_token(self, stage: int) -> int:
        """Keys and values of one token on one rank of a stage."""
        return self.layers[stage] * self.kv_bytes_per_token_layer

    def weight_bytes(self, stage: int) -> float:
        """Weights on one rank of a stage. A tied table is held twice if first and last stage differ."""
        tables = (stage == 0) + (stage == self.stages - 1)
        if self.stages == 1 and self.model.tied_embeddings:
            tables = 1
        return (self.layers[stage] * self.model.layer_bytes + tables * self.model.embedding_bytes) / self.tp

    def check_fits(self, device: Device, extra_bytes: float = 0.0, utilization: float = 1.0) -> None:
        """One line that says what to change if some stage's weights and `extra_bytes` exceed the device's memory."""
        usable = device.memory_bytes * utilization
        for stage in range(self.stages):
            if (needed := self.weight_bytes(stage) + extra_bytes) > usable:
                raise ValueError(
                    f"device={device.name} has {usable / 1e9:.1f} GB to use and stage {stage} needs "
                    f"{needed / 1e9:.1f} GB before any KV (tp={self.tp}, layers={list(self.layers)}): "
                    "raise tp or the number of stages, or take a larger device or a smaller model"
                )


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """As even as it goes; what is left over goes to the first stages, since the last one has the head to compute."""
    if not 1 <= stages <= layers:
        raise ValueError(f"stages={stages} must lie in 1..{layers}, the model's layers")
    least, more = divmod(layers, stages)
    return tuple(least + (stage < more) for stage in range(stages))


def kv_blocks(
    model: ModelShape,
    device: Device,
    tp: int = 1,
    stages: int = 1,
    layers: Sequence[int] | None = None,
    block_size: int = 16,
    utilization: float = 0.9,
    reserve_bytes: float = RESERVE_BYTES,
) -> int:
    """Blocks of `block_size` tokens that fit on the stage that has room for the fewest.

    On each: floor((memory * utilization - weights - reserve) / (block_size * KV bytes of a token on that stage)).
    """
    _check_memory_options(block_size, utilization, reserve_bytes)
    layout = Layout.of(model, tp, stages, layers)
    layout.check_fits(device, reserve_bytes, utilization)
    room = device.memory_bytes * utilization - reserve_bytes
    blocks = min(
        int((room - layout.weight_bytes(stage)) // (block_size * layout.kv_bytes_per_token(stage)))
        for stage in range(layout.stages)
    )
    if blocks < 1:
        raise ValueError(
            f"device={device.name} has no room for one KV block of {block_size} tokens; raise tp or stages"
        )
    return blocks


def _check_memory_options(block_size: int, utilization: float, reserve_bytes: float) -> None:
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization={utilization} must lie in (0, 1]")
    if reserve_bytes < 0:
        raise ValueError(f"reserve_bytes={reserve_bytes} must be 0 or more")


def _check_tp(model: ModelShape, tp: int) -> None:
    if tp < 1:
        raise ValueError(f"tp={tp} must be at least 1")
    if model.heads % tp:
        raise ValueError(f"tp={tp} must divide the model's {model.heads} heads")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ValueError(f"tp={tp} must divide the model's {model.kv_heads} KV heads, or be a multiple of them")


def _check_layers(model: ModelShape, layers: tuple[int, ...]) -> None:
    if not layers or min(layers) < 1:
        raise ValueError(f"layers={list(layers)}: every stage needs at least 1 layer")
    if sum(layers) != model.layers:
        raise ValueError(f"layers={list(layers)} sum to {sum(layers)}; the model has {model.layers}")
