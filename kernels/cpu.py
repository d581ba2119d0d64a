"""Operations that are fast on a CPU: few calls on large tensors, since each call costs microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.batch import PagedBatch

PADDING = 512
"""Padded (query, key) pairs that cost about as much as the calls for one more group (measured, see the docs)."""

PACKED = 1 << 16
"""Elements from which on a weight gains from oneDNN's layout: a call costs about 10 us more than MKL's (measured)."""

ROWS = 32
"""The batch that weights are laid out for; 8 to 256 made no difference (measured)."""

Project = Callable[[Tensor], Tensor]

GATHERED = 1 << 15
"""Tokens of KV that one group gathers at most, so that the copy stays small beside the pool."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference, by fewer and smaller calls than torch's own makes inside (measured: 11 us, not 17)."""
    if x.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    shrink = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * shrink).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference, but x is overwritten with the sum."""
    total = x.add_(residual)
    return rms_norm(total, weight, eps), total


def silu_mul(x: Tensor) -> Tensor:
    """As the reference, with one temporary less."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def can_pack() -> bool:
    """Whether this torch can store weights in oneDNN's own layout."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def linear(weight: Tensor, bias: Tensor | None) -> Project:
    """As the reference; large float32 weights are stored in oneDNN's own layout."""
    if weight.dtype == torch.float32 and weight.numel() >= PACKED:
        return PackedLinear(weight, bias)
    return reference.Linear(weight, bias)


class PackedLinear:
    """A projection whose weight oneDNN has laid out for itself once, so that no call has to."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs = weight.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if not x.shape[0]:  # oneDNN refuses it
            return x.new_empty(0, self._outputs)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def route(logits: Tensor, active: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference, without sorting what is not picked; which of equals is picked is torch's choice."""
    shares, ids = logits.float().softmax(-1).topk(active, -1)
    return (shares.div_(shares.sum(-1, keepdim=True)) if normalise else shares), ids.int()


class Experts:
    """As the reference: tokens sorted by expert, so that only experts that were picked do anything, each once."""

    def __init__(self, gate_up: Tensor, down: Tensor, held: Tensor | None = None) -> None:
        self._gate_up = [linear(weight, None) for weight in gate_up]
        self._down = [linear(weight, None) for weight in down]
        self._held = reference.held_in_order(gate_up) if held is None else held
        self._outputs = down.shape[1]

    def __call__(self, x: Tensor, shares: Tensor, picks: Tensor, residual: Tensor) -> Tensor:
        places = self._held[picks.long()].flatten()
        counts = torch.bincount(places + 1, minlength=len(self._down) + 1).tolist()  # first those of other ranks
        order = places.argsort()[counts[0] :]
        tokens = order // picks.shape[1]
        rows, sums = x.index_select(0, tokens), x.new_empty(len(order), self._outputs)
        begin = 0
        for expert, count in enumerate(counts[1:]):
            if count:
                here = slice(begin, begin + count)
                sums[here] = self._down[expert](silu_mul(self._gate_up[expert](rows[here])))
                begin += count
        total = torch.zeros(residual.shape, dtype=torch.float32)
        total.index_add_(0, tokens, shares.flatten()[order, None] * sums)
        return residual.add_(total)


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring slices of one length whose contexts are near enough to be padded to the longest."""

    rows: slice
    """Their tokens in the flat batch."""
    slices: int
    length: int
    context: int
    blocks: Tensor
    """Blocks to gather, [slices * blocks of the longest], int64."""
    stale: Tensor | None
    """Gathered tokens that belong to no sequence, as indices into [slices * blocks * block_size]."""
    mask: Tensor | None
    """0 where a query sees a key, else -inf, [slices, 1, length, context]; None if `causal` or everything is seen."""
    causal: bool


class Attention:
    """As the reference: gathers the pages of similar slices and gives each group to torch's fused attention."""

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch
        self._groups = _groups(batch)

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [T, H, D] -> [T, H * D]. A window that hides something is left to the reference."""
        if window is not None and window < max(self._batch.contexts, default=0):
            return reference.Attention(self._batch)(q, pool, scale, window)
        if len(self._groups) == 1:
            return _attend_pages(q, pool, self._groups[0], scale)
        return torch.cat([_attend_pages(q[group.rows], pool, group, scale) for group in self._groups])


class MlaAttention:
    """As the reference, in the same groups."""

    def __init__(self, batch: PagedBatch) -> None:
        self._groups = _groups(batch)

    def __call__(self, q: Tensor, pool: Tensor, rank: int, scale: float) -> Tensor:
        """q [T, H, C + R], pool [blocks, block_size, C + R] -> [T, H, C]."""
        pages = pool[:, :, None, None]  # one head, whose values are a part of its keys
        parts = []
        for group in self._groups:
            (keys,) = _gather(pages, group)
            parts.append(_attend(q[group.rows], keys, keys[..., :rank], group, scale))
        return torch.cat(parts).view(*q.shape[:2], rank)


def _groups(batch: PagedBatch) -> list[Group]:
    edges, contexts = [0, *accumulate(batch.lengths)], batch.contexts
    return [_group(batch, contexts, edges, first, last) for first, last in _partition(batch.lengths, contexts)]


def _attend_pages(q: Tensor, pool: Tensor, group: Group, scale: float) -> Tensor:
    keys, values = _gather(pool, group)
    return _attend(q, keys, values, group, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float) -> Tensor:
    """One group: q [slices * length, H, D] -> [slices * length, H * width of values]."""
    tokens, heads, head_dim = q.shape
    mask = None if group.mask is None else group.mask.to(q.dtype)
    if group.length == 1:
        # The query heads that share a key head are like several queries of one head: one product for all of them.
        queries = q.view(tokens, keys.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale).reshape(tokens, -1)
    queries = q.view(group.slices, group.length, heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=group.causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(tokens, -1)


def _gather(pool: Tensor, group: Group) -> tuple[Tensor, ...]:
    """What the pool's third axis holds of a group, keys and values, each [slices, K, context, D]."""
    blocks, block_size = pool.shape[:2]
    pages = pool.view(blocks, -1).index_select(0, group.blocks)
    if group.stale is not None:
        # Zero weight does not hide what a freed block held if that is infinite or NaN: 0 * inf is NaN.
        pages.view(len(group.blocks) * block_size, -1).index_fill_(0, group.stale, 0.0)
    kv = pages.view(group.slices, -1, *pool.shape[2:]).permute(2, 0, 3, 1, 4)
    return kv[:, :, :, : group.context].unbind(0)


def _partition(lengths: Sequence[int], contexts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each group, over slices in the order given: sorted by length and context is best."""
    first, padded, longest = 0, 0, 0
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        count = index - first
        if context > longest:
            padded += count * (context - longest)
            longest = context
        else:
            padded += longest - context
        fits = padded * length <= PADDING and (count + 1) * longest <= GATHERED
        if count and not (fits and length == lengths[first]):
            yield first, index
            first, padded, longest = index, 0, context
    if lengths:
        yield first, len(lengths)


def _group(batch: PagedBatch, all_contexts: list[int], edges: list[int], first: int, last: int) -> Group:
    starts, contexts = batch.starts[first:last], all_contexts[first:last]
    context, length = max(contexts), batch.lengths[first]
    width = -(-context // batch.block_size)
    causal = length > 1 and max(starts) == 0
    return Group(
        rows=slice(edges[first], edges[last]),
        slices=last - first,
        length=length,
        context=context,
        blocks=batch.tables[first:last, :width].flatten(),
        stale=_stale(contexts, context, width * batch.block_size, batch.tables.device),
        mask=None if causal else _mask(starts, length, context, batch.tables.device),
        causal=causal,
    )


def _stale(contexts: list[int], context: int, gathered: int, device: torch.device) -> Tensor | None:
    if min(contexts) == context:
        return None
    ends = torch.tensor(contexts, device=device)[:, None]
    row, column = (torch.arange(context, device=device) >= ends).nonzero(as_tuple=True)
    return row * gathered + column


def _mask(starts: Sequence[int], length: int, context: int, device: torch.device) -> Tensor | None:
    if length == 1 and min(starts) + 1 == context:
        return None
    seen = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
    hidden = torch.arange(context, device=device) > seen[:, :, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))[:, None]
