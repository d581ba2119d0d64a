"""The Llama-shaped decoder: Llama, Mistral without a window, Qwen2 (biased projections) and Qwen3 (normed heads).

It computes one flat batch of tokens. It does not know where the tokens come from, who owns the blocks, or what is
done with the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import DecoderConfig
from engine.kv import KvPool
from engine.rope import frequencies
from engine.weights import LayerWeights, Weights
from kernels.batch import PagedBatch
from kernels.reference import rope_table
from kernels.registry import Attend, Ops, Project


@dataclass(frozen=True, slots=True)
class Inputs:
    """One forward pass over T tokens of several sequences, on the model's device."""

    tokens: Tensor
    """Ids, [T] int64."""
    positions: Tensor
    """Of each token in its sequence, [T] int64."""
    slots: Tensor
    """Where each token's KV goes: block * block_size + offset, [T] int64."""
    rows: Tensor
    """Tokens whose successor is wanted, as indices into the batch, int64."""
    pages: PagedBatch


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one forward pass share."""

    attend: Attend
    cos: Tensor
    sin: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights as the chosen operations want them."""

    attention_norm: Tensor
    qkv: Project
    qk_norm: Tensor | None
    out: Project
    mlp_norm: Tensor
    gate_up: Project
    down: Project


class Decoder:
    """A decoder with its weights; calling it computes logits and writes KV into the pool it is given."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self.shape = config.shape
        self.ops = ops
        self._embedding = weights.embedding
        self._layers = [_layer(layer, ops) for layer in weights.layers]
        self._norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        """What follows each layer."""
        self._head = ops.linear(weights.head, None)
        self._scale = self.shape.head_dim**-0.5
        turns, scale = frequencies(config.rope, self.shape.head_dim)
        table = rope_table(turns, self.shape.max_length, scale, self.dtype)
        self._cos, self._sin = (part.to(self.device) for part in table)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def __call__(self, inputs: Inputs, pool: KvPool) -> Tensor:
        """Logits of the wanted rows, [rows, vocabulary], in the model's dtype."""
        shared = self._shared(inputs)
        residual = F.embedding(inputs.tokens, self._embedding)
        x = self.ops.rms_norm(residual, self._layers[0].attention_norm, self.config.rms_eps)
        for layer, kv, norm in zip(self._layers, pool.layers, self._norms, strict=True):
            x, residual = self._layer(layer, x, residual, kv, shared)
            x, residual = self.ops.add_rms_norm(x, residual, norm, self.config.rms_eps)
        return self._head(x.index_select(0, inputs.rows))

    def _shared(self, inputs: Inputs) -> _Pass:
        cos, sin = (table.index_select(0, inputs.positions) for table in (self._cos, self._sin))
        return _Pass(self.ops.attention(inputs.pages), cos, sin, inputs.slots)

    def _layer(self, layer: _Layer, x: Tensor, residual: Tensor, kv: Tensor, shared: _Pass) -> tuple[Tensor, Tensor]:
        """The normed input [T, hidden] of a layer -> its output before the residual is added, and the residual."""
        x = self._attention(layer, x, kv, shared)
        x, residual = self.ops.add_rms_norm(x, residual, layer.mlp_norm, self.config.rms_eps)
        return layer.down(self.ops.silu_mul(layer.gate_up(x))), residual

    def _attention(self, layer: _Layer, x: Tensor, kv: Tensor, shared: _Pass) -> Tensor:
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv = layer.qkv(x)  # [T, (heads + 2 * kv_heads) * head_dim]
        rotated = qkv.view(x.shape[0], -1, head_dim)[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            rotated.copy_(self.ops.rms_norm(rotated, layer.qk_norm, self.config.rms_eps))
        self.ops.rotate(rotated, shared.cos, shared.sin)
        # The keys were changed in place, so they and the values are still side by side.
        self.ops.write_kv(qkv[:, heads * head_dim :], shared.slots, kv)
        return layer.out(shared.attend(rotated[:, :heads], kv, self._scale))


def _layer(weights: LayerWeights, ops: Ops) -> _Layer:
    return _Layer(
        attention_norm=weights.attention_norm,
        qkv=ops.linear(*weights.qkv),
        qk_norm=weights.qk_norm,
        out=ops.linear(*weights.out),
        mlp_norm=weights.mlp_norm,
        gate_up=ops.linear(*weights.gate_up),
        down=ops.linear(*weights.down),
    )
