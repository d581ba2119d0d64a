"""The Llama-shaped decoder: Llama, Mistral, Qwen2 (biased projections), Qwen3 (normed heads), and what differs from
them in a part only: experts for the MLP (`moe`), latent attention for heads with keys of their own (`mla`).

It computes one flat batch of tokens. It does not know where the tokens come from, who owns the blocks, or what is
done with the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import DecoderConfig
from engine.kv import KvPool
from engine.models.mla import LatentAttention
from engine.models.moe import mixture
from engine.rope import frequencies
from engine.weights import LayerWeights, Weights
from kernels import reference
from kernels.batch import DeviceBatch, PagedBatch
from kernels.reference import rope_halves, rope_table
from kernels.registry import Ops


@dataclass(frozen=True, slots=True)
class Inputs:
    """One forward pass over T tokens of several sequences, on the model's device."""

    tokens: Tensor
    """Ids, [T] int32 or int64."""
    positions: Tensor
    """Of each token in its sequence, [T] int64."""
    slots: Tensor
    """Where each token's KV goes: block * block_size + offset, [T] int64; -1 (with a fused `place_qkv`): nowhere."""
    rows: Tensor | None
    """Tokens whose successor is wanted, as indices into the batch, int64; None: all."""
    pages: PagedBatch | DeviceBatch


class Place(Protocol):
    """What happens between the projection of queries, keys and values and the attention, in every layer of a pass."""

    def __call__(self, qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
        """qkv [T, (H + 2K) * D] -> queries [T, H, D]; keys and values go to the layer's pool. May overwrite qkv."""
        ...


class Team(Protocol):
    """Ranks that each have a share of every layer's heads and widths."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """The sum over all ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side, [rows, size * width]."""
        ...


class Neighbour(Protocol):
    """Another stage of the pipeline."""

    def receive(self, like: Tensor) -> Tensor: ...

    def send(self, x: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the model this is, and whom it speaks to: the whole, unless said otherwise."""

    first: bool = True
    last: bool = True
    team: Team | None = None
    before: Neighbour | None = None
    after: Neighbour | None = None


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class _Layer:
    """What follows on one layer's attention: norms, gate and residual belong to projections."""

    out: Callable[[Tensor, Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    """Or experts: adds to what it is given, in place."""


class Decoder:
    """A decoder with its weights; calling it computes logits and writes KV into the pool it is given."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops, part: Part = WHOLE) -> None:
        """`config` and `weights` are those of the part."""
        self.config = config
        self.shape = config.shape
        self.ops = ops
        self.part = part
        self._example = weights.layers[0].attention_norm
        self._embed = _embedding(weights.embedding, ops, part.team)
        self._layers = [_layer(layer, ops, config, part.team) for layer in weights.layers]
        self._head = _head(weights, config, ops, part.team)
        self._attention = _attention(config, weights.layers, ops)

    @property
    def dtype(self) -> torch.dtype:
        return self._example.dtype

    @property
    def device(self) -> torch.device:
        return self._example.device

    def __call__(self, inputs: Inputs, pool: KvPool) -> Tensor:
        """Logits of the wanted rows, [rows, vocabulary], in the model's dtype; [0, vocabulary] unless `part.last`.

        Hidden states come from the stage before and go to the one after.
        """
        part = self.part
        size = (len(inputs.tokens), self.shape.hidden)
        x = self.body(inputs, pool, None if part.before is None else part.before.receive(self._example.new_empty(size)))
        if part.after is None:
            return x
        part.after.send(x)
        return x.new_empty(0, self.shape.vocabulary)

    def body(self, inputs: Inputs, pool: KvPool, x: Tensor | None) -> Tensor:
        """What this stage computes, with nothing exchanged between stages.

        `x`: hidden states of the stage before, [T, hidden], which may be overwritten; None on the first stage.
        Returns hidden states [T, hidden], or on the last stage logits of the wanted rows, [rows, vocabulary].
        """
        attend = self._attention.of(inputs.pages, inputs.positions, inputs.slots)
        x = self._embed(inputs.tokens) if x is None else x  # every layer adds to it in place
        for index, (layer, kv) in enumerate(zip(self._layers, pool.layers, strict=True)):
            x = layer.mlp(layer.out(attend(index, x, kv), x))
        if not self.part.last:
            return x
        return self._head(x if inputs.rows is None else x.index_select(0, inputs.rows))


def _embedding(table: Tensor | None, ops: Ops, team: Team | None) -> Callable[[Tensor], Tensor]:
    """Rows of the table by tokens; of a team's rank those that it has, and all of them once they are added up."""
    if table is None:
        return _absent
    if team is None:
        # Padding may hold ids that are no rows; on a CPU there is none, and checking costs time.
        embed = F.embedding if table.device.type == "cpu" else ops.embedding
        return lambda tokens: embed(tokens, table)

    def embedded(tokens: Tensor) -> Tensor:
        x = ops.embedding(tokens - team.rank * len(table), table)
        team.all_reduce(x)
        return x

    return embedded


def _head(weights: Weights, config: DecoderConfig, ops: Ops, team: Team | None) -> Callable[[Tensor], Tensor]:
    """Logits of hidden states; each of a team's ranks has some columns, and gets all."""
    if weights.norm is None or weights.head is None:
        return _absent
    project = ops.norm_linear(weights.norm, config.rms_eps, weights.head, None)
    if team is None:
        return project
    return lambda x: team.gather(project(x))[:, : config.shape.vocabulary]


def _absent(_: Tensor) -> Tensor:
    raise RuntimeError("this stage of the pipeline has no such part")


def _summed(add: Callable[[Tensor, Tensor], Tensor], team: Team | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Every rank of a team adds its share to the residual, which comes in once."""
    if team is None:
        return add

    def added(y: Tensor, x: Tensor) -> Tensor:
        if team.rank:
            x.zero_()
        x = add(y, x)
        team.all_reduce(x)
        return x

    return added


Attended = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, x [T, hidden], the layer's pool) -> what the layer's heads found, [T, width]; writes the tokens' KV."""


def _attention(config: DecoderConfig, layers: tuple[LayerWeights, ...], ops: Ops) -> _Heads | LatentAttention:
    if config.shape.latent is None:
        return _Heads(config, layers, ops)
    weights = [layer.latent for layer in layers if layer.latent is not None]
    return LatentAttention(config, weights, [layer.attention_norm for layer in layers], ops)


class _Heads:
    """Attention whose keys and values are cached as they are, of all layers."""

    def __init__(self, config: DecoderConfig, layers: tuple[LayerWeights, ...], ops: Ops) -> None:
        self._ops, self._windows, self._scale = ops, config.windows, config.shape.head_dim**-0.5
        self._qkv = [
            ops.norm_linear(layer.attention_norm, config.rms_eps, *layer.qkv)
            for layer in layers
            if layer.qkv is not None
        ]
        self._norms = [layer.qk_norm for layer in layers]
        fused, like = ops.place_qkv is not reference.place_qkv, layers[0].attention_norm
        self._places: _Fused | _Stepwise = (_Fused if fused else _Stepwise)(config, ops, like.dtype, like.device)

    def of(self, pages: PagedBatch | DeviceBatch, positions: Tensor, slots: Tensor) -> Attended:
        attend = self._ops.attention(pages)
        place = self._places.of(positions, slots)

        def attended(index: int, x: Tensor, kv: Tensor) -> Tensor:
            queries = place(self._qkv[index](x), self._norms[index], kv)
            return attend(queries, kv, self._scale, self._windows[index])

        return attended


class _Fused:
    """One operation for everything between projection and attention."""

    def __init__(self, config: DecoderConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._op, self._heads, self._eps = ops.place_qkv, config.shape.heads, config.rms_eps
        turns, scale = frequencies(config.rope)
        halves = rope_halves(turns, config.shape.max_length, scale, torch.float32)
        self._cos, self._sin = (part.to(device) for part in halves)

    def of(self, positions: Tensor, slots: Tensor) -> Place:
        def place(qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
            return self._op(qkv, positions, slots, self._cos, self._sin, kv, self._heads, norm, self._eps)

        return place


class _Stepwise:
    """Norm of heads, rotation and write, one after another."""

    def __init__(self, config: DecoderConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._ops, self._shape, self._eps = ops, config.shape, config.rms_eps
        turns, scale = frequencies(config.rope)
        table = rope_table(turns, self._shape.max_length, scale, dtype)
        self._cos, self._sin = (part.to(device) for part in table)

    def of(self, positions: Tensor, slots: Tensor) -> Place:
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        heads, kv_heads, head_dim = self._shape.heads, self._shape.kv_heads, self._shape.head_dim

        def place(qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
            rotated = qkv.view(len(qkv), -1, head_dim)[:, : heads + kv_heads]
            if norm is not None:
                rotated.copy_(self._ops.rms_norm(rotated, norm, self._eps))
            self._ops.rotate(rotated[..., : cos.shape[-1]], cos, sin)
            # The keys were changed in place, so they and the values are still side by side.
            self._ops.write_kv(qkv[:, heads * head_dim :], slots, kv)
            return rotated[:, :heads]

        return place


def _layer(weights: LayerWeights, ops: Ops, config: DecoderConfig, team: Team | None) -> _Layer:
    return _Layer(
        out=_summed(ops.add_linear(*weights.out), team),
        mlp=_mlp(weights, ops, config, team),
    )


def _mlp(weights: LayerWeights, ops: Ops, config: DecoderConfig, team: Team | None) -> Callable[[Tensor], Tensor]:
    norm, eps = weights.mlp_norm, config.rms_eps
    if weights.experts is not None:
        add = _summed(mixture(weights.experts, weights.gate_up, weights.down, ops, config.routing), team)
        return lambda x: add(ops.rms_norm(x, norm, eps), x)
    if weights.gate_up is None or weights.down is None:
        raise ValueError("a layer has neither an MLP nor experts")
    inner, add = ops.norm_gated(norm, eps, *weights.gate_up), _summed(ops.add_linear(*weights.down), team)
    return lambda x: add(inner(x), x)
