"""The specification: every operation in plain torch, as short as it can be said.

Shapes: T tokens of a flat batch, H query heads, K key-value heads, D elements of a head, S slices or rows, V
vocabulary. One layer's KV pool is [blocks, block_size, 2, K, D]: index 0 of the third axis is the key, 1 the value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import PagedBatch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; `weight` broadcasts against x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of x [T, heads, D], in place; element i is paired with element i + D/2.

    `cos` and `sin` are [T, 1, D]; the first half of `sin` is negated, see `rope_table`.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).add_(swapped.mul_(sin))


def rope_table(frequencies: Tensor, length: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of cos and signed sin for positions 0 .. length, each [length, 1, D]; `frequencies` is [D/2] in radians."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [T, 2 * width], which holds gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def write_kv(kv: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Store kv [T, 2 * K * D] (keys, then values) of each token at its slot: block * block_size + offset."""
    blocks, block_size = pool.shape[:2]
    pool.view(blocks * block_size, -1).index_copy_(0, slots, kv)


class Linear:
    """A projection x [T, in] -> [T, out] by weight [out, in] and bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Attention:
    """Causal attention of a batch over its pages, slice by slice in float32."""

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch

    def __call__(self, q: Tensor, pool: Tensor, scale: float) -> Tensor:
        """q [T, H, D] -> [T, H * D]. The batch's own keys and values are in the pool already."""
        queries = q.split(list(self._batch.lengths))
        parts = [self._slice(part, index, pool, scale) for index, part in enumerate(queries)]
        return torch.cat(parts).flatten(1).to(q.dtype)

    def _slice(self, q: Tensor, index: int, pool: Tensor, scale: float) -> Tensor:
        start, length = self._batch.starts[index], self._batch.lengths[index]
        positions = torch.arange(start + length, device=q.device)
        size = self._batch.block_size
        kv = pool[self._batch.tables[index][positions // size], positions % size].float()  # [context, 2, K, D]
        group = q.shape[1] // kv.shape[2]
        keys, values = (kv[:, part].repeat_interleave(group, 1) for part in (0, 1))  # [context, H, D]
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        future = positions > positions[start:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token for each row of logits [S, V], by the inverse of its distribution at `uniform` [S] in [0, 1).

    First the temperature [S] (above 0), then the top_k [S] likeliest tokens (V keeps all), then the fewest of these
    that together have at least the share top_p [S]. Equal probabilities rank by id. Returns ids [S].
    """
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature[:, None]
    shares, ids = scaled.softmax(-1).sort(descending=True, stable=True)
    ranks = torch.arange(shares.shape[1], device=logits.device)
    shares = shares.masked_fill(ranks >= top_k[:, None], 0.0)
    shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill((before >= top_p[:, None]) & (ranks > 0), 0.0)
    return ids.gather(1, _invert(shares, uniform))[:, 0]


def _invert(shares: Tensor, uniform: Tensor) -> Tensor:
    """The first place [S, 1] at which the running sum of shares [S, V] exceeds `uniform` of its total."""
    sums = shares.cumsum(-1)
    places = torch.searchsorted(sums, uniform[:, None].double() * sums[:, -1:], right=True)
    last = (shares > 0).sum(-1, keepdim=True) - 1  # a product may round up to the total
    return torch.minimum(places, last)
