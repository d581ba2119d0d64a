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
    """As the reference; torch's fused kernel."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


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
        if not len(x):  # oneDNN refuses it
            return x.new_empty(0, self._outputs)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


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
    """True where a query sees a key, [slices, 1, length, context]; None where `causal` or everything is seen."""
    causal: bool


class Attention:
    """As the reference: gathers the pages of similar slices and gives each group to torch's fused attention."""

    def __init__(self, batch: PagedBatch) -> None:
        edges = [0, *accumulate(batch.lengths)]
        self._groups = [_group(batch, edges, first, last) for first, last in _partition(batch)]

    def __call__(self, q: Tensor, pool: Tensor, scale: float) -> Tensor:
        """q [T, H, D] -> [T, H * D]."""
        if len(self._groups) == 1:
            return _attend(q, pool, self._groups[0], scale)
        return torch.cat([_attend(q[group.rows], pool, group, scale) for group in self._groups])


def _attend(q: Tensor, pool: Tensor, group: Group, scale: float) -> Tensor:
    """One group: q [slices * length, H, D] -> [slices * length, H * D]."""
    kv = _gather(pool, group)  # [slices, context, 2, K, D]
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    queries = q.unflatten(0, (group.slices, group.length)).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=group.mask, is_causal=group.causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(q.shape[0], -1)


def _gather(pool: Tensor, group: Group) -> Tensor:
    blocks, block_size = pool.shape[:2]
    pages = pool.view(blocks, -1).index_select(0, group.blocks)
    if group.stale is not None:
        # Zero weight does not hide what a freed block held if that is infinite or NaN: 0 * inf is NaN.
        pages.view(len(group.blocks) * block_size, -1).index_fill_(0, group.stale, 0.0)
    return pages.view(group.slices, -1, *pool.shape[2:])[:, : group.context]


def _partition(batch: PagedBatch) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each group, over slices in the order given: sorted by length and context is best."""
    first, padded, longest = 0, 0, 0
    for index, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        count = index - first
        padded += count * max(context - longest, 0) + max(longest - context, 0)
        longest = max(longest, context)
        fits = padded * length <= PADDING and (count + 1) * longest <= GATHERED
        if count and not (fits and length == batch.lengths[first]):
            yield first, index
            first, padded, longest = index, 0, context
    if batch.lengths:
        yield first, len(batch.lengths)


def _group(batch: PagedBatch, edges: list[int], first: int, last: int) -> Group:
    starts, contexts = batch.starts[first:last], batch.contexts[first:last]
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
    return (torch.arange(context, device=device) <= seen[:, :, None])[:, None]
