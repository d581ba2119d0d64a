"""Multi-head latent attention (DeepSeek-V2, V3, Kimi): the cache holds one compressed vector a token, for all heads.

Queries are taken to the compressed space, the expansion of keys being absorbed into them, and what heads attend to is
expanded afterwards. Whole first chunks of prompts, whose keys and values are needed once and all together, are expanded
instead and attended to as in any other model: a third of the arithmetic. It does not know who owns the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.config import DecoderConfig
from engine.rope import frequencies, score_scale
from engine.weights import LayerWeights
from kernels.batch import DeviceBatch, PagedBatch, Span
from kernels.reference import rope_halves
from kernels.registry import Attend, Ops, Project
from playground.model import Latent

EPS = 1e-6
"""Of the norms of compressed vectors: DeepSeek's code does not give them the model's own."""

Pages = PagedBatch | DeviceBatch


@dataclass(frozen=True, slots=True)
class _Layer:
    down: Project
    queries: Project | None
    kv_norm: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Fresh:
    """The first chunks of prompts in a batch: they see nothing but each other's tokens."""

    rows: slice
    """Of the flat batch."""
    attend: Attend
    """Told that each token is a block of its own in a pool that holds them in order."""


class LatentAttention:
    """The attention of all layers; `shape` and weights are those of one rank."""

    def __init__(self, config: DecoderConfig, layers: Sequence[LayerWeights], ops: Ops) -> None:
        if config.shape.latent is None:
            raise ValueError("latent attention needs a shape with `latent`")
        self._sizes: Latent = config.shape.latent
        self._heads, self._eps, self._ops = config.shape.heads, config.rms_eps, ops
        self._layers = [_layer(layer, self._eps, ops) for layer in layers]
        turns, factor = frequencies(config.rope)
        halves = rope_halves(turns, config.shape.max_length, factor, torch.float32)
        self._cos, self._sin = (part.to(layers[0].attention_norm.device) for part in halves)
        self._scale = (self._sizes.nope + self._sizes.rope) ** -0.5 * score_scale(config.rope)

    def of(self, pages: Pages, positions: Tensor, slots: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
        """For one batch: (layer, x [T, hidden], the layer's pool) -> [T, H * value], what heads found."""
        fresh = first_chunks(pages, self._ops) if self._sizes.value <= self._sizes.nope + self._sizes.rope else None
        begun = None if fresh is None else fresh.rows.start
        attend = None if begun == 0 else self._ops.mla_attention(pages if begun is None else singles(pages))

        def attended(index: int, x: Tensor, kv: Tensor) -> Tensor:
            layer = self._layers[index]
            queries = self._placed(layer, x, positions, slots, kv)
            parts = []
            if attend is not None:
                found = attend(self._absorbed(layer, queries[:begun]), kv, self._sizes.kv_rank, self._scale)
                parts.append(torch.bmm(found.transpose(0, 1), layer.values.transpose(1, 2)).transpose(0, 1).flatten(1))
            if fresh is not None:
                latents = kv.view(-1, self._sizes.cached).index_select(0, slots[fresh.rows])
                parts.append(self._expanded(layer, queries[fresh.rows], latents, fresh.attend))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attended

    def put(self, place: int, layer: LayerWeights, window: int | None) -> None:
        """A layer, which comes before the one that has been there; it has no window."""
        self._layers.insert(place, _layer(layer, self._eps, self._ops))

    def drop(self, place: int) -> None:
        self._layers.pop(place)

    def _placed(self, layer: _Layer, x: Tensor, positions: Tensor, slots: Tensor, kv: Tensor) -> Tensor:
        """Queries [T, H, nope + rope], rotated; the tokens' compressed vectors go to the pool."""
        made = layer.down(x)
        queries, latents = made.split((made.shape[1] - self._sizes.cached, self._sizes.cached), 1)
        if layer.queries is not None:
            queries = layer.queries(queries.contiguous())
        heads = queries.unflatten(1, (self._heads, -1))
        self._ops.place_latent(heads, latents, positions, slots, self._cos, self._sin, kv, layer.kv_norm, EPS)
        return heads

    def _absorbed(self, layer: _Layer, queries: Tensor) -> Tensor:
        """[T, H, nope + rope] -> [T, H, cached]: what to multiply compressed vectors with."""
        plain, turned = queries.split((self._sizes.nope, self._sizes.rope), -1)
        return torch.cat((torch.bmm(plain.transpose(0, 1), layer.keys).transpose(0, 1), turned), -1)

    def _expanded(self, layer: _Layer, queries: Tensor, latents: Tensor, attend: Attend) -> Tensor:
        """Attention to the keys and values of T tokens' own heads: queries [T, H, D] -> [T, H * value]."""
        sizes, (tokens, heads, width) = self._sizes, queries.shape
        compressed, turned = latents.split((sizes.kv_rank, sizes.rope), 1)
        pool = latents.new_zeros(tokens, 1, 2, heads, width)  # values are narrower than keys
        pool[:, 0, 0, :, : sizes.nope] = (compressed @ layer.keys.flatten(0, 1).T).unflatten(1, (heads, -1))
        pool[:, 0, 0, :, sizes.nope :] = turned[:, None]
        pool[:, 0, 1, :, : sizes.value] = (compressed @ layer.values.flatten(0, 1).T).unflatten(1, (heads, -1))
        found = attend(queries.contiguous(), pool, self._scale)
        return found.view(tokens, heads, width)[..., : sizes.value].flatten(1)


def _layer(layer: LayerWeights, eps: float, ops: Ops) -> _Layer:
    if (weights := layer.latent) is None:
        raise ValueError("a layer has no latent attention, but the model does")
    queries = None
    if weights.queries is not None and weights.query_norm is not None:
        queries = ops.norm_linear(weights.query_norm, EPS, weights.queries, None)
    down = ops.norm_linear(layer.attention_norm, eps, *weights.down)
    return _Layer(down, queries, weights.kv_norm, weights.keys, weights.values)


def first_chunks(pages: Pages, ops: Ops) -> Fresh | None:
    """The prefills of a batch, if they all are first chunks and the host knows it; the others come before them."""
    spans = pages.spans
    begun = _singles(spans) if isinstance(pages, PagedBatch) else pages.decodes
    prefills = spans[begun:]
    if not prefills or any(start for start, _ in prefills):
        return None
    lengths = [length for _, length in prefills]
    rows = slice(begun, begun + sum(lengths))
    if isinstance(pages, PagedBatch):
        firsts = torch.tensor([0, *accumulate(lengths[:-1])], device=pages.tables.device)
        batch: Pages = PagedBatch([0] * len(lengths), lengths, _in_order(firsts, lengths), 1)
    else:
        if pages.offsets is None:
            return None
        offsets = pages.offsets - begun  # on the device: a copy from the host would wait for the steps before
        contexts = pages.contexts[begun:].clone()
        batch = DeviceBatch(0, contexts, _in_order(offsets[:-1], lengths), offsets, pages.tokens, spans=prefills)
    return Fresh(rows, ops.attention(batch))


def _in_order(firsts: Tensor, lengths: list[int]) -> Tensor:
    """Block tables of slices whose tokens lie one after another from `firsts` on, a token a block."""
    tables = firsts[:, None] + torch.arange(max(lengths), dtype=firsts.dtype, device=firsts.device)
    return tables.clamp_(max=sum(lengths) - 1)  # beyond a slice any block will do


def singles(pages: Pages) -> Pages:
    """The rows of one token that a batch begins with, alone."""
    if isinstance(pages, DeviceBatch):
        return pages.rows()
    count = _singles(pages.spans)
    return replace(pages, starts=pages.starts[:count], lengths=pages.lengths[:count], tables=pages.tables[:count])


def _singles(spans: Sequence[Span]) -> int:
    return next((index for index, (_, length) in enumerate(spans) if length > 1), len(spans))
