"""Causal attention of many queries a slice over a paged KV pool.

FlashAttention-2 (Dao 2023) with the query heads of one KV head side by side in a tile, so that a page is read once for
all of them. It knows no sequence, no step and no other layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import autotune
from kernels.autotune import Bucket
from kernels.triton.launch import LOG2E, power_of_two, require, shared_memory, store, upcasts
from kernels.triton.pages import MOST_ROWS, check


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How prefill is cut: found by timing, right whatever it is."""

    rows: int
    """Query rows of a tile: tokens times the query heads of one KV head."""
    tile: int
    """Tokens of KV a program reads at once."""
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if any(size & (size - 1) or size < 1 for size in (self.rows, self.tile, self.warps)):
            raise ValueError(f"rows={self.rows}, tile={self.tile}, warps={self.warps}: not powers of two")
        # What no GPU can run must not come from a damaged cache. 16: the least that tensor cores take.
        if not (16 <= self.rows <= 256 and 16 <= self.tile <= 256 and self.warps <= 16 and 1 <= self.stages <= 8):
            raise ValueError(f"{self}: out of range")


def prefill_config(dtype: torch.dtype, head_dim: int, room: int) -> PrefillConfig:
    """What serves where nothing was tuned, in programs of `room` bytes of shared memory."""
    if dtype == torch.float32:
        rows = 64 if room >= 160 << 10 else 32 if head_dim <= 128 else 16
        return PrefillConfig(rows, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim <= 64:
        return PrefillConfig(128, 128, 8, 3)
    return PrefillConfig(128, 64, 8, 3) if head_dim <= 128 else PrefillConfig(64, 32, 4, 2)


def bucket(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Bucket:
    """What a config is found for."""
    return Bucket("prefill", str(dtype).removeprefix("torch."), f"h{heads}k{kv_heads}d{head_dim}", 1)


@cache
def configured(dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, head_dim: int) -> PrefillConfig:
    """The tuned config for these sizes, or the default."""
    key = bucket(dtype, heads, kv_heads, head_dim)
    tuned = None if (known := store(device)) is None else known.best(PrefillConfig, key, source())
    return tuned or prefill_config(dtype, head_dim, shared_memory(device))


@cache
def source() -> str:
    return autotune.fingerprint(Path(__file__))


def prefill(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    offsets: Tensor,
    scale: float,
    *,
    tokens: int | None = None,
    window: int | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Causal attention of slices of several queries: q [T, H, D], pool [blocks, block_size, 2, K, D] -> [T, H * D].

    Slice i has the queries `offsets[i] .. offsets[i + 1]` of the flat batch, the last of which sees `contexts[i]`
    tokens, itself included (or the last `window`). `tables` [S, W], `contexts` [S] and `offsets` [S + 1] are int32 on
    the device. Rows of q in no slice are neither read nor written; a slice may be empty. `tokens`: at least the
    number of tokens in all slices, which bounds the grid; T by default.
    """
    check(q, pool, tables, contexts)
    require(scale > 0, f"attention: scale {scale} must be above 0")
    _, heads, head_dim = q.shape
    kv_heads, group = pool.shape[3], heads // pool.shape[3]
    out = q.new_empty(len(q), heads * head_dim) if out is None else out
    slices = len(contexts)
    require(len(offsets) == slices + 1 and offsets.dtype == torch.int32, "prefill: offsets must be int32 [slices + 1]")
    require(slices <= MOST_ROWS, f"prefill: {slices} slices, at most {MOST_ROWS}")
    config = config or configured(q.dtype, q.device, heads, kv_heads, head_dim)
    together = tile_tokens(config, group)
    tiles = (len(q) if tokens is None else tokens) // together + slices
    _prefill[(kv_heads, tiles)](
        q, pool, tables, contexts, offsets, out,
        scale * LOG2E, window or 0, slices, q.stride(0), q.stride(1), out.stride(0), tables.stride(0),
        pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
        GROUP=group, TOKENS=together, ROWS=max(config.rows, power_of_two(group)),
        DIM=head_dim, DIM_PAD=max(16, power_of_two(head_dim)), BLOCK_SIZE=pool.shape[1], TILE=config.tile,
        SLICES=max(8, power_of_two(slices)), WINDOWED=window is not None, UPCAST=upcasts(q.dtype),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def tile_tokens(config: PrefillConfig, group: int) -> int:
    """Tokens of one query tile."""
    return max(config.rows, power_of_two(group)) // group


@triton.jit(do_not_specialize=["window", "slices"])
def _prefill(
    q, pool, tables, contexts, offsets, out,
    scale, window, slices, q_row, q_head, out_row, table_row,
    pool_block, pool_token, pool_part, pool_head,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SLICES: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one slice and KV head; row r is query head r % GROUP of token r // GROUP."""
    head = tl.program_id(0)
    # Late tiles see the most keys and start first, so that the short ones fill the gaps at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    ids = tl.arange(0, SLICES)
    begins = tl.load(offsets + ids, mask=ids < slices, other=0)
    lengths = tl.load(offsets + ids + 1, mask=ids < slices, other=0) - begins
    ends = tl.cumsum((lengths + TOKENS - 1) // TOKENS, 0)
    index = tl.sum((ends <= tile).to(tl.int32), 0)
    if index < slices:
        here = ids == index
        length = tl.sum(tl.where(here, lengths, 0), 0)
        begin = tl.sum(tl.where(here, begins, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
        first = (tile - end + (length + TOKENS - 1) // TOKENS) * TOKENS
        context = tl.load(contexts + index)
        start = context - length

        rows = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PAD)
        token = first + rows // GROUP
        # Rows beyond the slice repeat its last token: all arithmetic stays finite, nothing of it is stored.
        position = start + tl.minimum(token, length - 1)
        real = (token < length) & (rows < TOKENS * GROUP)
        query = (begin + token).to(tl.int64) * q_row + (head * GROUP + rows % GROUP) * q_head
        present = real[:, None] & (dim[None, :] < DIM)
        queries = tl.load(q + query[:, None] + dim[None, :], mask=present, other=0.0)
        if UPCAST:
            queries = queries.to(tl.float32)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, DIM_PAD), tl.float32)
        # Keys that every query of the tile sees need no mask; those around the diagonal do.
        last = tl.minimum(start + first + TOKENS, context)
        whole = (start + first + 1) // TILE
        low = 0
        if WINDOWED:
            low = tl.maximum(start + first + 1 - window, 0) // TILE
            whole = low
        table = tables + index.to(tl.int64) * table_row
        shared = pool + head * pool_head
        top, weight, sums = _attend(
            queries, top, weight, sums, position, low, whole, context, table, shared, scale, window,
            pool_block, pool_token, pool_part, DIM, DIM_PAD, BLOCK_SIZE, TILE, False, WINDOWED, UPCAST,
        )  # fmt: skip
        top, weight, sums = _attend(
            queries, top, weight, sums, position, whole, (last + TILE - 1) // TILE, context, table, shared, scale,
            window, pool_block, pool_token, pool_part, DIM, DIM_PAD, BLOCK_SIZE, TILE, True, WINDOWED, UPCAST,
        )  # fmt: skip
        result = (sums / weight[:, None]).to(out.dtype.element_ty)
        place = (begin + token).to(tl.int64) * out_row + (head * GROUP + rows % GROUP) * DIM
        tl.store(out + place[:, None] + dim[None, :], result, mask=present)


@triton.jit
def _attend(
    queries, top, weight, sums, position, low, high, context, table, pool, scale, window,
    pool_block, pool_token, pool_part, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles low .. high. In float32, three tf32 products make one as good as float32."""
    dim = tl.arange(0, DIM_PAD)
    # One tile ahead, as in decode. A table reaches as far as its context; beyond it nothing is read.
    token = low * TILE + tl.arange(0, TILE)
    next_block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)
    for tile in range(low, high):
        block = next_block.to(tl.int64)
        token = tile * TILE + tl.arange(0, TILE)
        next_block = tl.load(table + (token + TILE) // BLOCK_SIZE, mask=token + TILE < context, other=0)
        places = block * pool_block + (token % BLOCK_SIZE) * pool_token
        pointers = pool + places[:, None] + dim[None, :]
        if MASKED:
            present = (token < context)[:, None] & (dim[None, :] < DIM)
            keys = tl.load(pointers, mask=present, other=0.0)
            values = tl.load(pointers + pool_part, mask=present, other=0.0)
        elif DIM == DIM_PAD:
            keys = tl.load(pointers)
            values = tl.load(pointers + pool_part)
        else:
            keys = tl.load(pointers, mask=dim[None, :] < DIM, other=0.0)
            values = tl.load(pointers + pool_part, mask=dim[None, :] < DIM, other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        safe = new_top
        if WINDOWED:
            # A later query of the tile may see nothing of the first key tiles.
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(scores * scale - safe[:, None])
        fading = tl.exp2(top - safe)
        weight = weight * fading + tl.sum(shares, 1)
        sums = sums * fading[:, None]
        sums = tl.dot(shares.to(values.dtype), values, sums, input_precision="tf32x3")
        top = new_top
    return top, weight, sums
