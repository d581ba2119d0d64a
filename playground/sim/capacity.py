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
    """How a model is cut: every stage holds `layers[stage]` consecutive layers, cut again over `tp` ranks.

    Experts are shared by the ranks of a stage, and by those of all `pooling` replicas that pool their tokens for them
    (DP attention): `ep` groups of ranks hold whole experts each, and the ranks of a group a slice of each of these.
    """

    model: ModelShape
    tp: int
    layers: tuple[int, ...]
    ep: int = 1
    pooling: int = 1

    def __post_init__(self) -> None:
        _check_tp(self.model, self.tp)
        _check_layers(self.model, self.layers)
        _check_experts(self)

    @classmethod
    def of(
        cls,
        model: ModelShape,
        tp: int = 1,
        stages: int = 1,
        layers: Sequence[int] | None = None,
        ep: int = 1,
        pooling: int = 1,
    ) -> Layout:
        """With `layers` where they are given (`stages` may then be left out), else an even split."""
        if layers is None:
            return cls(model, tp, even_layers(model.layers, stages), ep, pooling)
        if stages not in (1, len(layers)):
            raise ValueError(f"stages={stages} but layers={list(layers)} name {len(layers)}; give one of the two")
        return cls(model, tp, tuple(layers), ep, pooling)

    @property
    def stages(self) -> int:
        return len(self.layers)

    def stage_layers(self, stage: int) -> range:
        """Numbers of the layers that a stage holds."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def expert_layers(self, stage: int) -> int:
        """How many layers of a stage have experts."""
        return sum(map(self.model.has_experts, self.stage_layers(stage)))

    # On one rank.

    @property
    def kv_heads(self) -> int:
        """KV heads on one rank: with more ranks than heads each head is held several times."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer on one rank; of latent attention each rank holds everything."""
        if self.model.latent:
            return self.model.kv_bytes_per_token_layer
        return 2 * self.kv_heads * self.model.head_dim * self.model.precision.kv_bytes(self.model.dtype_bytes)

    def kv_bytes_per_token(self, stage: int) -> float:
        """Keys and values of one token on one rank of a stage."""
        if self.model.compressed:
            return sum(map(self.model.kv_bytes_of, self.stage_layers(stage)))
        return self.layers[stage] * self.kv_bytes_per_token_layer

    def attention_weights(self, layer: int) -> float:
        """Matrix elements of a layer's attention on one rank."""
        model = self.model
        if whole := model.whole_weights(layer):
            return whole + (model.attention_matrices(layer) - whole) / self.tp
        return model.hidden * (2 * model.query_width / self.tp + 2 * self.kv_heads * model.head_dim)

    @property
    def shared_weights(self) -> float:
        """Matrix elements of one layer's shared experts on one rank; 0 without."""
        return 3 * self.model.hidden * self.model.experts.shared / self.tp if self.model.experts else 0.0

    @property
    def router_weights(self) -> int:
        """Matrix elements of one layer's router (and gate of shared experts), which each rank holds whole."""
        if self.model.experts is None:
            return 0
        return self.model.hidden * (self.model.experts.count + self.model.experts.shared_gate)

    @property
    def expert_slices(self) -> int:
        """Ranks that share each expert, a slice each."""
        return self.tp * self.pooling // self.ep

    @property
    def experts_held(self) -> int:
        """Routed experts of one layer of which one rank holds all or a slice."""
        return self.model.experts.count // self.ep if self.model.experts else 0

    def matrix_bytes(self, layer: int) -> float:
        """Of what every token of a step is multiplied with in a layer: routed experts are not among it."""
        model = self.model
        weight = model.precision.weight_bytes(model.dtype_bytes)
        if model.has_experts(layer):
            matrices = self.attention_weights(layer) + self.shared_weights
            return matrices * weight + self.router_weights * model.dtype_bytes
        return (self.attention_weights(layer) + model.mlp_weights / self.tp) * weight

    def vector_bytes(self, layer: int) -> float:
        """Of a layer's norms and biases."""
        model = self.model
        more = (model.attention_vector(layer) - model.attention_vectors) * model.dtype_bytes / self.tp
        if model.experts and model.has_experts(layer):
            matrices = model.attention_weights + model.common_weights + model.experts.count * model.expert_weights
            # Biases of experts lie with them; how few these are makes a finer count idle.
            return (model.expert_layer_parameters - matrices) * model.dtype_bytes / self.tp + more
        return (model.layer_parameters - model.linear_weights) * model.dtype_bytes / self.tp + more

    def matrix_flops(self, layer: int) -> float:
        """Of one token in what `matrix_bytes` counts."""
        model = self.model
        if model.has_experts(layer):
            return 2 * (
                self.attention_weights(layer)
                + self.shared_weights
                + self.router_weights
                + model.mixing_parameters / self.tp
            )
        return 2 * (self.attention_weights(layer) + (model.mlp_weights + model.mixing_parameters) / self.tp)

    @property
    def expert_bytes(self) -> float:
        """Of what one rank holds of one routed expert."""
        return self.model.expert_bytes / self.expert_slices

    @property
    def expert_flops(self) -> float:
        """Of one token in what one rank holds of one routed expert."""
        return 2 * self.model.expert_weights / self.expert_slices

    def layer_bytes(self, layer: int) -> float:
        """Weights of one layer on one rank."""
        routed = self.experts_held * self.expert_bytes if self.model.has_experts(layer) else 0.0
        return self.matrix_bytes(layer) + self.vector_bytes(layer) + routed

    def weight_bytes(self, stage: int) -> float:
        """Weights on one rank of a stage. A tied table is held twice if first and last stage differ."""
        model = self.model
        tables = (stage == 0) + (stage == self.stages - 1)
        if self.stages == 1 and model.tied_embeddings:
            tables = 1
        beside = model.encoder_parameters * model.dtype_bytes if stage == 0 else 0
        layers = sum(map(self.layer_bytes, self.stage_layers(stage)))
        return layers + (tables * model.embedding_bytes + beside) / self.tp

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
    ep: int = 1,
    pooling: int = 1,
) -> int:
    """Blocks of `block_size` tokens that fit on the stage that has room for the fewest.

    On each: floor((memory * utilization - weights - reserve) / (block_size * KV bytes of a token on that stage)).
    """
    _check_memory_options(block_size, utilization, reserve_bytes)
    layout = Layout.of(model, tp, stages, layers, ep, pooling)
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
    if not (model.latent or model.compressed) and model.kv_heads % tp and tp % model.kv_heads:
        raise ValueError(f"tp={tp} must divide the model's {model.kv_heads} KV heads, or be a multiple of them")


def _check_layers(model: ModelShape, layers: tuple[int, ...]) -> None:
    if not layers or min(layers) < 1:
        raise ValueError(f"layers={list(layers)}: every stage needs at least 1 layer")
    if sum(layers) != model.layers:
        raise ValueError(f"layers={list(layers)} sum to {sum(layers)}; the model has {model.layers}")


def _check_experts(layout: Layout) -> None:
    if layout.pooling < 1:
        raise ValueError(f"pooling={layout.pooling} must be at least 1")
    if layout.ep < 1:
        raise ValueError(f"ep={layout.ep} must be at least 1")
    if layout.ep == 1:
        return
    if layout.model.experts is None:
        raise ValueError(f"ep={layout.ep}: {layout.model.architecture} has no experts to deal out; set ep=1")
    if layout.model.experts.count % layout.ep:
        raise ValueError(f"ep={layout.ep} must divide the model's {layout.model.experts.count} experts")
    if (ranks := layout.tp * layout.pooling) % layout.ep:
        raise ValueError(f"ep={layout.ep} must divide the {ranks} ranks that share the experts")
