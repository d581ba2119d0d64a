"""Cutting a model's tensors for one rank: layers by stage, heads, widths and vocabulary by tensor-parallel rank.

Column-parallel projections (queries, keys, values, gate, up) give each rank outputs of its own; row-parallel ones (out,
down) give sums that all ranks add up (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.parallel.layout import Held
from engine.weights import ExpertWeights, LatentWeights, LayerWeights, Linear
from playground.model import ModelShape


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank keeps of a model of this (whole) shape; `held`: of its experts, None: a share of each."""

    shape: ModelShape
    layers: range
    rank: int = 0
    size: int = 1
    held: Held | None = None

    @property
    def first(self) -> bool:
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        return self.layers.stop == self.shape.layers

    def layer(self, whole: LayerWeights) -> LayerWeights:
        if whole.experts is not None:
            whole = replace(whole, experts=self._experts(whole.experts))
        if self.size == 1:
            return whole
        shape = self.shape
        heads = [shape.query_width, shape.kv_width, shape.kv_width]
        return replace(
            whole,
            qkv=whole.qkv and self._columns(whole.qkv, heads, [shape.heads, shape.kv_heads, shape.kv_heads]),
            qk_norm=None if whole.qk_norm is None else self._norms(whole.qk_norm),
            out=self._rows(whole.out),
            gate_up=None if whole.gate_up is None else self._gates_ups(whole.gate_up),
            down=None if whole.down is None else self._rows(whole.down),
            latent=None if whole.latent is None else self._latent(whole.latent),
        )

    def _latent(self, whole: LatentWeights) -> LatentWeights:
        """Heads are shared out; what makes the compressed vectors is no head's, and on every rank."""
        heads = self.shape.heads
        if whole.queries is None:
            cached = len(whole.down.weight) - self.shape.query_width
            down = self._columns(whole.down, [self.shape.query_width, cached], [heads, 1])
        else:
            down = whole.down
        return whole._replace(
            down=down,
            queries=None if whole.queries is None else self._heads(whole.queries, heads),
            keys=self._heads(whole.keys, heads).contiguous(),
            values=self._heads(whole.values, heads).contiguous(),
        )

    def vocabulary(self, table: Tensor) -> Tensor:
        """This rank's rows of an embedding or a head; zeros where the last rank has fewer."""
        if self.size == 1:
            return table
        each = -(-len(table) // self.size)
        mine = table[self.rank * each : (self.rank + 1) * each]
        return F.pad(mine, (0, 0, 0, each - len(mine))).contiguous()

    def _gates_ups(self, whole: Linear) -> Linear:
        return self._columns(whole, [len(whole.weight) // 2] * 2, [self.size] * 2)

    def _experts(self, whole: ExpertWeights) -> ExpertWeights:
        """Some experts, or a part of each, and the whole router: every rank picks the same."""
        experts, part, parts = self.held or Held(range(len(whole.down)), self.rank, self.size)
        own = slice(experts.start, experts.stop)
        gates_ups, down = whole.gate_up[own], whole.down[own]
        if parts > 1:
            gates_ups = gates_ups.unflatten(1, (2, -1)).chunk(parts, 2)[part].flatten(1, 2)
            down = down.chunk(parts, 2)[part]
        if len(experts) < len(whole.down) or parts > 1:  # else nothing is left out that could be freed
            gates_ups, down = (weight.clone(memory_format=torch.contiguous_format) for weight in (gates_ups, down))
        return whole._replace(gate_up=gates_ups, down=down)

    def _columns(self, whole: Linear, widths: list[int], heads: list[int]) -> Linear:
        weight = self._part(whole.weight, widths, heads)
        return Linear(weight, None if whole.bias is None else self._part(whole.bias, widths, heads))

    def _rows(self, whole: Linear) -> Linear:
        """A bias is added once: by the first rank."""
        return Linear(whole.weight.chunk(self.size, 1)[self.rank].contiguous(), None if self.rank else whole.bias)

    def _norms(self, whole: Tensor) -> Tensor:
        heads = [self.shape.heads, self.shape.kv_heads]
        return self._part(whole, heads, heads)

    def _part(self, whole: Tensor, widths: Sequence[int], heads: Sequence[int]) -> Tensor:
        """Of each of several tensors under one another, of so many rows and heads, this rank's heads."""
        parts = zip(whole.split(list(widths)), heads, strict=True)
        return torch.cat([self._heads(part, count) for part, count in parts])

    def _heads(self, part: Tensor, count: int) -> Tensor:
        if count % self.size == 0:
            return part.chunk(self.size)[self.rank]
        return part.chunk(count)[self.rank * count // self.size]  # fewer than ranks: some ranks hold the same one
