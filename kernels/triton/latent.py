"""Latent attention (MLA) over a compressed paged cache, absorbed: every head attends to the same vectors.

Flash-decoding (Dao et al. 2023) for rows of one query, whose context is split over as many programs as the machine has
room for, and FlashAttention-2 (Dao 2023) for chunks of prompts with whatever history they have. It knows no sequence,
no step and no other layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch import DeviceBatch, PagedBatch
from kernels.triton.attention import on_device
from kernels.triton.launch import (
    FLOATS,
    LOG2E,
    contiguous_rows,
    multiprocessors,
    power_of_two,
    require,
    shared_memory,
    upcasts,
)
from kernels.triton.pages import MOST_ROWS

MOST_RANK = 512
"""Elements of a value: a program holds a sum as wide for each of its query rows."""

MOST_SPLITS = 64

HEADS_TOGETHER = 16
"""Heads of one program, as many as tensor cores take rows: they share every key that is read."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How latent attention is cut: right whatever it is."""

    rows: int
    """Query rows of a prefill's program: tokens times heads."""
    tile: int
    """Tokens of the cache that a program reads at once."""
    warps: int
    stages: int


def latent_config(dtype: torch.dtype, room: int) -> LatentConfig:
    """What fits programs of `room` bytes of shared memory, at the widest rank."""
    if dtype == torch.float32:
        return LatentConfig(16, 16, 4, 1)
    return LatentConfig(32, 32, 8, 2) if room >= 160 << 10 else LatentConfig(16, 32, 8, 1)


class MlaAttention:
    """As the reference; a `DeviceBatch` needs no host, a `PagedBatch` is moved to the device first."""

    def __init__(self, batch: PagedBatch | DeviceBatch) -> None:
        self._batch = batch if isinstance(batch, DeviceBatch) else on_device(batch)

    def __call__(self, q: Tensor, pool: Tensor, rank: int, scale: float, out: Tensor | None = None) -> Tensor:
        """q [T, H, C + R] -> [T, H, C]. Rows that belong to no slice are not written."""
        batch, rows = self._batch, self._batch.decodes
        out = q.new_empty(*q.shape[:2], rank) if out is None else out
        if rows:
            latent_decode(q[:rows], pool, batch.tables, batch.contexts[:rows], rank, scale, out=out[:rows])
        if batch.offsets is not None:
            latent_prefill(
                q, pool, batch.tables[rows:], batch.contexts[rows:], batch.offsets, rank, scale, tokens=batch.tokens,
                out=out,
            )  # fmt: skip
        return out


def splits_of(rows: int, heads: int, device: torch.device) -> int:
    """Programs that share one row's context: by machine and batch alone, so that a graph serves any contexts."""
    programs = rows * triton.cdiv(heads, HEADS_TOGETHER)
    return max(1, min(2 * multiprocessors(device) // programs, MOST_SPLITS))


def latent_decode(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    rank: int,
    scale: float,
    *,
    out: Tensor | None = None,
    splits: int | None = None,
    config: LatentConfig | None = None,
) -> Tensor:
    """Attention of one query a row: q [R, H, C + R], pool [blocks, block_size, C + R] -> [R, H, C], C being `rank`.

    Row i sees the first `contexts[i]` tokens of its sequence, its own included; token p lies in block `tables[i, p //
    block_size]`. `tables` and `contexts` are int32 on the device. A row with context 0 is padding: its table is not
    read and its output is zero. Each context is cut in `splits`.
    """
    _check(q, pool, tables, contexts, rank, scale)
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, rank) if out is None else out
    splits = splits or splits_of(rows, heads, q.device)
    config = config or latent_config(q.dtype, shared_memory(q.device))
    partials = torch.empty(rows, splits, heads, rank, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, splits, heads, 2, dtype=torch.float32, device=q.device)
    _latent[(triton.cdiv(heads, HEADS_TOGETHER), rows, splits)](
        q, pool, tables, contexts, contexts, out, partials, stats, scale * LOG2E, rows,
        *_strides(q, pool, tables, out), TOKENS=1, ROWS=HEADS_TOGETHER, SLICES=1, DECODE=True,
        **_constants(q, pool, rank, config),
    )  # fmt: skip
    _merge[(rows, heads)](
        partials, stats, out, splits, out.stride(0), out.stride(1), HEADS=heads, RANK=rank,
        RANK_PAD=power_of_two(rank), num_warps=4,
    )  # fmt: skip
    return out


def latent_prefill(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    offsets: Tensor,
    rank: int,
    scale: float,
    *,
    tokens: int | None = None,
    out: Tensor | None = None,
    config: LatentConfig | None = None,
) -> Tensor:
    """Causal attention of slices of several queries: q [T, H, C + R] -> [T, H, C], C being `rank`.

    Slice i has the queries `offsets[i] .. offsets[i + 1]` of the flat batch, the last of which sees `contexts[i]`
    tokens, itself included. Rows of q in no slice are neither read nor written; a slice may be empty. `tokens`: at
    least the number of tokens in all slices, which bounds the grid; T by default.
    """
    _check(q, pool, tables, contexts, rank, scale)
    slices, heads = len(contexts), q.shape[1]
    require(len(offsets) == slices + 1 and offsets.dtype == torch.int32, "latent: offsets must be int32 [slices + 1]")
    out = q.new_empty(len(q), heads, rank) if out is None else out
    config = config or latent_config(q.dtype, shared_memory(q.device))
    together = max(config.rows // HEADS_TOGETHER, 1)
    tiles = (len(q) if tokens is None else tokens) // together + slices
    _latent[(triton.cdiv(heads, HEADS_TOGETHER), tiles, 1)](
        q, pool, tables, contexts, offsets, out, out, out, scale * LOG2E, slices, *_strides(q, pool, tables, out),
        TOKENS=together, ROWS=together * HEADS_TOGETHER, SLICES=max(8, power_of_two(slices)), DECODE=False,
        **_constants(q, pool, rank, config),
    )  # fmt: skip
    return out


def _strides(q: Tensor, pool: Tensor, tables: Tensor, out: Tensor) -> tuple[int, ...]:
    return (
        q.stride(0), q.stride(1), pool.stride(0), pool.stride(1), tables.stride(0), out.stride(0), out.stride(1),
    )  # fmt: skip


def _constants(q: Tensor, pool: Tensor, rank: int, config: LatentConfig) -> Mapping[str, int]:
    rope = q.shape[2] - rank
    return dict(
        HEADS=q.shape[1], TOGETHER=HEADS_TOGETHER, RANK=rank, RANK_PAD=max(16, power_of_two(rank)), ROPE=rope,
        ROPE_PAD=max(16, power_of_two(rope)), BLOCK_SIZE=pool.shape[1], TILE=config.tile, UPCAST=upcasts(q.dtype),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slices"])
def _latent(
    q, pool, tables, contexts, offsets, out, partials, stats, scale, slices,
    q_row, q_head, pool_block, pool_token, table_row, out_row, out_head,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, DECODE: tl.constexpr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`TOGETHER` heads of `TOKENS` queries of one slice over all they see, or (decode) of one query over a part of it.

    Row r is head r % TOGETHER of token r // TOGETHER.
    """
    if DECODE:
        index = tl.program_id(1)
        begin = index
        length = 1
        first = 0
    else:
        # Late tiles see the most keys and start first, so that the short ones fill the gaps at the end.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        ids = tl.arange(0, SLICES)
        begins = tl.load(offsets + ids, mask=ids < slices, other=0)
        lengths = tl.load(offsets + ids + 1, mask=ids < slices, other=0) - begins
        ends = tl.cumsum((lengths + TOKENS - 1) // TOKENS, 0)
        index = tl.sum((ends <= tile).to(tl.int32), 0)
        here = ids == index
        length = tl.sum(tl.where(here, lengths, 0), 0)
        begin = tl.sum(tl.where(here, begins, 0), 0)
        first = (tile - tl.sum(tl.where(here, ends, 0), 0) + (length + TOKENS - 1) // TOKENS) * TOKENS
    if index < slices:
        context = tl.load(contexts + index)
        start = context - length
        rows = tl.arange(0, ROWS)
        rank = tl.arange(0, RANK_PAD)
        rope = tl.arange(0, ROPE_PAD)
        token = first + rows // TOGETHER
        head = tl.program_id(0) * TOGETHER + rows % TOGETHER
        # Rows beyond the slice repeat its last token: all arithmetic stays finite, nothing of it is stored.
        position = start + tl.minimum(token, length - 1)
        real = (token < length) & (head < HEADS)
        query = q + (begin + token).to(tl.int64)[:, None] * q_row + head[:, None] * q_head
        plain = tl.load(query + rank[None, :], mask=real[:, None] & (rank[None, :] < RANK), other=0.0)
        turned = tl.load(query + RANK + rope[None, :], mask=real[:, None] & (rope[None, :] < ROPE), other=0.0)
        if UPCAST:
            plain = plain.to(tl.float32)
            turned = turned.to(tl.float32)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, RANK_PAD), tl.float32)
        low = 0
        high = (tl.minimum(start + first + TOKENS, context) + TILE - 1) // TILE
        if DECODE:
            share = (high + tl.num_programs(2) - 1) // tl.num_programs(2)
            low = tl.program_id(2) * share
            high = tl.minimum(high, low + share)
        table = tables + index.to(tl.int64) * table_row
        for number in range(low, high):
            seen = number * TILE + tl.arange(0, TILE)
            present = seen < context
            block = tl.load(table + seen // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
            # Unseen tokens are not read at all: zero weight would not hide a NaN that a freed block holds.
            key = pool + (block * pool_block + (seen % BLOCK_SIZE) * pool_token)[:, None]
            latents = tl.load(key + rank[None, :], mask=present[:, None] & (rank[None, :] < RANK), other=0.0)
            keys = tl.load(key + RANK + rope[None, :], mask=present[:, None] & (rope[None, :] < ROPE), other=0.0)
            if UPCAST:
                latents = latents.to(tl.float32)
                keys = keys.to(tl.float32)
            scores = tl.dot(plain, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee")
            scores = tl.where(seen[None, :] <= position[:, None], scores, float("-inf"))
            # The first tile that a program reads has a token that all its rows see, so the maximum is finite.
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            shares = tl.exp2(scores * scale - new_top[:, None])
            fading = tl.exp2(top - new_top)
            weight = weight * fading + tl.sum(shares, 1)
            sums = sums * fading[:, None]
            sums = tl.dot(shares.to(latents.dtype), latents, sums, input_precision="ieee")
            top = new_top

        stored = real[:, None] & (rank[None, :] < RANK)
        if DECODE:
            slot = ((begin * tl.num_programs(2) + tl.program_id(2)) * HEADS + head).to(tl.int64)
            tl.store(partials + slot[:, None] * RANK + rank[None, :], sums, mask=stored)
            tl.store(stats + slot * 2, top, mask=real)
            tl.store(stats + slot * 2 + 1, weight, mask=real)
        else:
            place = out + (begin + token).to(tl.int64)[:, None] * out_row + head[:, None] * out_head
            tl.store(place + rank[None, :], (sums / weight[:, None]).to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partials, stats, out, splits, out_row, out_head, HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr
):
    """The weighted mean of one row and head's partial results; zero where nothing was seen."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    rank = tl.arange(0, RANK_PAD)
    real = rank < RANK
    top = float("-inf")
    for split in range(splits):
        top = tl.maximum(top, tl.load(stats + ((row * splits + split) * HEADS + head).to(tl.int64) * 2))
    top = tl.where(top == float("-inf"), 0.0, top)  # nothing was seen
    weight = 0.0
    sums = tl.zeros((RANK_PAD,), tl.float32)
    for split in range(splits):
        slot = ((row * splits + split) * HEADS + head).to(tl.int64)
        factor = tl.exp2(tl.load(stats + slot * 2) - top)
        weight += tl.load(stats + slot * 2 + 1) * factor
        sums += tl.load(partials + slot * RANK + rank, mask=real, other=0.0) * factor
    result = sums / tl.where(weight > 0, weight, 1.0)
    place = out + row.to(tl.int64) * out_row + head * out_head
    tl.store(place + rank, result.to(out.dtype.element_ty), mask=real)


def place_latent(
    q: Tensor, latents: Tensor, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, norm: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """As the reference: rotates q [T, H, D] in place, stores normed and rotated latents [T, C + R] in the pool."""
    tokens, heads, head_dim = q.shape
    rank, half = len(norm), cos.shape[1]
    require(latents.shape[1] == pool.shape[2] == rank + 2 * half, f"place_latent: rows must be {rank} + {2 * half}")
    require(cos.shape == sin.shape and 2 * half <= head_dim, "place_latent: cos and sin must be [positions, R/2]")
    require(cos.stride(0) == sin.stride(0), "place_latent: cos and sin must have the same row stride")
    require(q.dtype == latents.dtype == pool.dtype, f"place_latent: q is {q.dtype}, the pool {pool.dtype}")
    contiguous_rows("place_latent", q, latents, cos, sin, pool, norm, positions, slots)
    if tokens:
        together = min(16, power_of_two(heads))
        _place_latent[(tokens, triton.cdiv(heads, together))](
            q, latents, positions, slots, cos, sin, pool, norm, eps,
            q.stride(0), q.stride(1), latents.stride(0), cos.stride(0), pool.stride(0), pool.stride(1),
            HEADS=heads, TOGETHER=together, NOPE=head_dim - 2 * half, RANK=rank, RANK_PAD=power_of_two(rank), HALF=half,
            HALF_PAD=power_of_two(half), BLOCK_SIZE=pool.shape[1], num_warps=4,
        )  # fmt: skip


@triton.jit
def _place_latent(
    q, latents, positions, slots, cos, sin, pool, norm, eps,
    q_row, q_head, latent_row, table_row, pool_block, pool_token,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """`TOGETHER` heads of one token; the first program of a token stores its compressed vector, too."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + token).to(tl.int64), 0)  # of padding any will do
    pair = tl.arange(0, HALF_PAD)
    whole = pair < HALF
    turns = tl.load(cos + position * table_row + pair, mask=whole, other=0.0).to(tl.float32)
    tilts = tl.load(sin + position * table_row + pair, mask=whole, other=0.0).to(tl.float32)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    real = (head[:, None] < HEADS) & whole[None, :]
    place = q + token * q_row + head[:, None] * q_head + NOPE + pair[None, :]
    left = tl.load(place, mask=real, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=real, other=0.0).to(tl.float32)
    tl.store(place, (left * turns[None, :] - right * tilts[None, :]).to(q.dtype.element_ty), mask=real)
    tl.store(place + HALF, (right * turns[None, :] + left * tilts[None, :]).to(q.dtype.element_ty), mask=real)
    slot = tl.load(slots + token).to(tl.int64)
    if (tl.program_id(1) == 0) & (slot >= 0):
        rank = tl.arange(0, RANK_PAD)
        source = latents + token * latent_row
        target = pool + (slot // BLOCK_SIZE) * pool_block + (slot % BLOCK_SIZE) * pool_token
        plain = tl.load(source + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        by = tl.load(norm + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        normed = plain * tl.rsqrt(tl.sum(plain * plain, 0) / RANK + eps) * by
        tl.store(target + rank, normed.to(pool.dtype.element_ty), mask=rank < RANK)
        left_key = tl.load(source + RANK + pair, mask=whole, other=0.0).to(tl.float32)
        right_key = tl.load(source + RANK + HALF + pair, mask=whole, other=0.0).to(tl.float32)
        turned = (left_key * turns - right_key * tilts).to(pool.dtype.element_ty)
        tl.store(target + RANK + pair, turned, mask=whole)
        turned = (right_key * turns + left_key * tilts).to(pool.dtype.element_ty)
        tl.store(target + RANK + HALF + pair, turned, mask=whole)


def _check(q: Tensor, pool: Tensor, tables: Tensor, contexts: Tensor, rank: int, scale: float) -> None:
    require(q.dim() == 3 and pool.dim() == 3, "mla_attention: q is [T, H, C + R], pool [blocks, block_size, C + R]")
    require(q.shape[2] == pool.shape[2], f"mla_attention: rows of {q.shape[2]} in q, {pool.shape[2]} in the pool")
    require(0 < rank < q.shape[2] and rank <= MOST_RANK, f"mla_attention: rank {rank} of {q.shape[2]}, at most 512")
    require(q.dtype == pool.dtype and q.dtype in FLOATS, f"mla_attention: q is {q.dtype}, the pool {pool.dtype}")
    ints = tables.dtype == contexts.dtype == torch.int32
    require(
        ints and len(tables) >= len(contexts), "mla_attention: tables and contexts must be int32, a table a context"
    )
    require(len(contexts) <= MOST_ROWS, f"mla_attention: {len(contexts)} slices, at most {MOST_ROWS}")
    require(scale > 0, f"mla_attention: scale {scale} must be above 0")
    contiguous_rows("mla_attention", q, pool, tables, contexts)
