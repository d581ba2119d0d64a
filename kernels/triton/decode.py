"""Attention of one query a row over a paged KV pool, the context split over the whole machine.

Flash-decoding (Dao et al. 2023) with the work cut as in Stream-K (Osama et al. 2023): all tiles of all rows and heads
form one line, and every program takes an equal share of it, whatever the contexts are. The grid knows the machine
only, so one captured graph serves any contexts. It knows no sequence, no step and no other layer.
"""
# ruff: noqa: C901, SIM108 - a kernel is one function, and its branches are resolved by the compiler

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import autotune
from kernels.autotune import Bucket
from kernels.triton.launch import LOG2E, early, multiprocessors, power_of_two, require, store, upcasts
from kernels.triton.pages import MOST_ROWS, check

MOST_PROGRAMS = 8
"""Programs a multiprocessor at most."""

ITEM_TOKENS = 64
"""An item takes as long as so many tokens of it, to be begun and ended: 1.8 us on an H200, where 64 tokens take 2.7.
Were it left out, programs that get many short items would be late."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode is cut: found by timing, right whatever it is."""

    tile: int
    """Tokens of KV a program reads at once."""
    warps: int
    stages: int
    programs: int
    """Programs a multiprocessor is given."""
    least: int
    """Tiles below which a program's share is not cut: each cut costs a partial result."""

    def __post_init__(self) -> None:
        if any(size & (size - 1) or size < 1 for size in (self.tile, self.warps)):
            raise ValueError(f"tile={self.tile}, warps={self.warps}: not powers of two")
        if not (1 <= self.programs <= MOST_PROGRAMS and 1 <= self.stages <= 8 and self.least >= 1):
            raise ValueError(f"programs={self.programs}, stages={self.stages}, least={self.least}: out of range")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of one decode at a time: streams that overlap need one each.

    Kernels leave `counters` at zero, as they found it.
    """

    partials: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def create(cls, device: torch.device, rows: int, heads: int, kv_heads: int, head_dim: int) -> Workspace:
        """Enough for `rows` rows under any config that keeps to `MOST_PROGRAMS` programs a multiprocessor."""
        slots = 2 * MOST_PROGRAMS * multiprocessors(device)
        group = heads // kv_heads
        return cls(
            torch.empty(slots * group * head_dim, dtype=torch.float32, device=device),
            torch.empty(slots * group * 2, dtype=torch.float32, device=device),
            torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


def decode_config(dtype: torch.dtype, head_dim: int, rows: int) -> DecodeConfig:
    """What serves where nothing was tuned."""
    wide = head_dim * dtype.itemsize
    tile = 64 if wide <= 256 else 32 if wide <= 512 else 16
    return DecodeConfig(tile=tile, warps=4, stages=3, programs=2 if rows < 16 else 3, least=1 if rows < 16 else 4)


def bucket(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rows: int) -> Bucket:
    """What a config is found for."""
    name = str(dtype).removeprefix("torch.")
    return Bucket("decode", name, f"h{heads}k{kv_heads}d{head_dim}", power_of_two(max(rows, 1)))


@cache
def configured(
    dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, head_dim: int, rows: int
) -> DecodeConfig:
    """The tuned config for these sizes, or the default."""
    key = bucket(dtype, heads, kv_heads, head_dim, rows)
    tuned = None if (known := store(device)) is None else known.best(DecodeConfig, key, source())
    return tuned or decode_config(dtype, head_dim, rows)


@cache
def source() -> str:
    return autotune.fingerprint(Path(__file__))


def decode(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attention of one query a row: q [R, H, D], pool [blocks, block_size, 2, K, D] -> [R, H * D].

    Row i sees the first `contexts[i]` tokens of its sequence, its own included, or the last `window` of these; token p
    lies in block `tables[i, p // block_size]`. `tables` [R, W] and `contexts` [R] are int32 on the device. A row with
    context 0 is padding: its table is not read and its output is zero. Without a `workspace` one is made (a launch
    more). Head sizes that are not powers of two cost the next one's arithmetic, not its memory traffic.
    """
    check(q, pool, tables, contexts)
    require(scale > 0, f"attention: scale {scale} must be above 0")
    rows, heads, head_dim = q.shape
    kv_heads, group = pool.shape[3], heads // pool.shape[3]
    out = q.new_empty(rows, heads * head_dim) if out is None else out
    config = config or configured(q.dtype, q.device, heads, kv_heads, head_dim, rows)
    workspace = workspace or Workspace.create(q.device, rows, heads, kv_heads, head_dim)
    programs = config.programs * multiprocessors(q.device)
    _check_workspace(workspace, programs, rows * kv_heads, group * head_dim)
    require(rows <= MOST_ROWS, f"decode: {rows} rows, at most {MOST_ROWS}")
    # More partial results at once are merged sooner, at a price in registers that many rows would feel.
    flat = power_of_two(group * head_dim)
    item = max(1, ITEM_TOKENS // config.tile)
    _decode[(programs,)](
        q, pool, tables, contexts, out, workspace.partials, workspace.stats, workspace.counters,
        scale * LOG2E, window or 0, rows, config.least + item,
        q.stride(0), q.stride(1), out.stride(0), tables.stride(0),
        pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, power_of_two(group)),
        DIM=head_dim, DIM_PAD=max(16, power_of_two(head_dim)), BLOCK_SIZE=pool.shape[1], TILE=config.tile, ITEM=item,
        ROWS=max(16, power_of_two(rows)), FLAT=flat, CHUNK=max(1, min(16, (2048 if rows < 16 else 1024) // flat)),
        WINDOWED=window is not None, UPCAST=upcasts(q.dtype),
        num_warps=config.warps, num_stages=config.stages, **early(q.device),
    )  # fmt: skip
    return out


# Numbers that change from call to call must not mean another compilation.
@triton.jit(do_not_specialize=["window", "rows", "least"])
def _decode(
    q, pool, tables, contexts, out, partials, stats, counters,
    scale, window, rows, least, q_row, q_head, out_row, table_row,
    pool_block, pool_token, pool_part, pool_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ITEM: tl.constexpr, ROWS: tl.constexpr, FLAT: tl.constexpr, CHUNK: tl.constexpr,
    WINDOWED: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Items are (row, KV head) in this order, each ITEM units and its row's tiles long; program p takes units p*U/P ..
    (p+1)*U/P, and of an item's own ITEM units, which come first, nothing is to be done."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    row_ids = tl.arange(0, ROWS)
    lengths = tl.load(contexts + row_ids, mask=row_ids < rows, other=0)
    firsts = tl.zeros_like(lengths)
    if WINDOWED:
        firsts = tl.maximum(lengths - window, 0) // TILE
    tiles = (lengths + TILE - 1) // TILE - firsts
    units = tl.where(tiles > 0, tiles + ITEM, 0)
    ends = tl.cumsum(units, 0) * KV_HEADS
    total = tl.sum(units, 0) * KV_HEADS
    sharers = tl.minimum(tl.num_programs(0), (total + least - 1) // least)

    # 64 bits: units of all rows times programs may pass 2^31.
    mine = tl.minimum(program, sharers).to(tl.int64)
    begin = (mine * total // tl.maximum(sharers, 1)).to(tl.int32)
    end = (tl.minimum(mine + 1, sharers) * total // tl.maximum(sharers, 1)).to(tl.int32)
    # Where a little slack lets every program have one piece of one item, that is cheaper than equal shares, of which
    # most span two items. `share` is the longest piece then, else 0.
    share = _even_share(tiles, tl.sum(tiles, 0) * KV_HEADS, least - ITEM, KV_HEADS)
    pieces = (tiles + tl.maximum(share, 1) - 1) // tl.maximum(share, 1)
    piece = 0
    if share > 0:
        bounds = tl.cumsum(pieces, 0) * KV_HEADS
        row = tl.sum((bounds <= program).to(tl.int32), 0)
        here = row_ids == row
        row_tiles = tl.sum(tl.where(here, tiles, 0), 0)
        row_pieces = tl.maximum(tl.sum(tl.where(here, pieces, 0), 0), 1)
        past = program - tl.sum(tl.where(here, bounds, 0), 0) + row_pieces * KV_HEADS
        piece = past % row_pieces
        begin = tl.sum(tl.where(here, ends, 0), 0) - (KV_HEADS - past // row_pieces) * (row_tiles + ITEM) + ITEM
        end = begin + (piece + 1) * row_tiles // row_pieces
        begin += piece * row_tiles // row_pieces
    idle = program
    while idle < rows:
        if tl.load(contexts + idle) == 0:
            for start in range(0, KV_HEADS * GROUP * DIM, 1024):
                places = start + tl.arange(0, 1024)
                zeros = tl.zeros((1024,), tl.float32).to(out.dtype.element_ty)
                tl.store(out + idle.to(tl.int64) * out_row + places, zeros, mask=places < KV_HEADS * GROUP * DIM)
        idle += tl.num_programs(0)
    while begin < end:
        row = tl.sum((ends <= begin).to(tl.int32), 0)
        here = row_ids == row
        row_tiles = tl.sum(tl.where(here, tiles, 0), 0)
        length = tl.sum(tl.where(here, lengths, 0), 0)
        first = tl.sum(tl.where(here, firsts, 0), 0)
        row_begin = tl.sum(tl.where(here, ends, 0), 0) - (row_tiles + ITEM) * KV_HEADS
        head = (begin - row_begin) // (row_tiles + ITEM)
        item_begin = row_begin + head * (row_tiles + ITEM)
        stop = tl.minimum(end, item_begin + row_tiles + ITEM)
        skipped = tl.maximum(begin - item_begin - ITEM, 0)
        count = tl.maximum(stop - item_begin - ITEM, 0) - skipped

        group = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, DIM_PAD)
        real = (group[:, None] < GROUP) & (dim[None, :] < DIM)
        queries = tl.load(
            q + row.to(tl.int64) * q_row + (head * GROUP + group[:, None]) * q_head + dim[None, :], mask=real, other=0.0
        )
        if UPCAST:
            queries = queries.to(tl.float32)
        top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        weight = tl.zeros((GROUP_PAD,), tl.float32)
        sums = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
        table = tables + row.to(tl.int64) * table_row
        # One tile ahead: the pages' loads then wait for a register, and Triton pipelines them as deep as it is told to.
        token = (first + skipped) * TILE + tl.arange(0, TILE)
        next_block = tl.load(table + token // BLOCK_SIZE, mask=token < length, other=0)
        for tile in range(first + skipped, first + skipped + count):
            block = next_block.to(tl.int64)
            token = tile * TILE + tl.arange(0, TILE)
            next_block = tl.load(table + (token + TILE) // BLOCK_SIZE, mask=token + TILE < length, other=0)
            seen = token < length
            if WINDOWED:
                seen = seen & (token >= length - window)
            places = block * pool_block + (token % BLOCK_SIZE) * pool_token + head * pool_head
            # Unseen tokens are not read at all: zero weight would not hide a NaN that a freed block holds.
            if DIM == DIM_PAD:
                present = seen[:, None]
            else:
                present = seen[:, None] & (dim[None, :] < DIM)
            keys = tl.load(pool + places[:, None] + dim[None, :], mask=present, other=0.0)
            values = tl.load(pool + pool_part + places[:, None] + dim[None, :], mask=present, other=0.0)
            if UPCAST:
                keys = keys.to(tl.float32)
                values = values.to(tl.float32)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            scores = tl.where(seen[None, :], scores, float("-inf"))
            # Every tile has a token that is seen, so the maximum is finite.
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            shares = tl.exp2(scores * scale - new_top[:, None])
            fading = tl.exp2(top - new_top)
            weight = weight * fading + tl.sum(shares, 1)
            sums = sums * fading[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            top = new_top

        out_item = out + row.to(tl.int64) * out_row + head * (GROUP * DIM)
        within = group[:, None] * DIM + dim[None, :]
        if count == row_tiles:
            result = sums / weight[:, None]
            tl.store(out_item + within, result.to(out.dtype.element_ty), mask=real)
        elif count > 0:
            # A program has at most two partial items: one that began before it, one that ends after it.
            slot = program * 2 + (skipped == 0).to(tl.int32)
            tl.store(partials + slot * (GROUP * DIM) + within, sums, mask=real)
            tl.store(stats + slot * (2 * GROUP) + group, top, mask=group < GROUP)
            tl.store(stats + slot * (2 * GROUP) + GROUP + group, weight, mask=group < GROUP)
            if share > 0:
                first_sharer = program - piece
                parts = (row_tiles + share - 1) // share
            else:
                wide = total.to(tl.int64)
                first_sharer = (((item_begin + ITEM + 1).to(tl.int64) * sharers - 1) // wide).to(tl.int32)
                last_sharer = (((item_begin + ITEM + row_tiles).to(tl.int64) * sharers - 1) // wide).to(tl.int32)
                parts = last_sharer - first_sharer + 1
            # All threads' stores come before the one thread's count, and all loads of the last program after it.
            tl.debug_barrier()
            counter = counters + row * KV_HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.debug_barrier()
                _merge(out_item, partials, stats, first_sharer, parts, GROUP, DIM, FLAT, CHUNK)
                tl.store(counter, 0)
        begin = stop


@triton.jit
def _even_share(tiles, total, least, KV_HEADS: tl.constexpr):
    """The shortest piece into which all items can be cut with a program for each, 0 if it is far above equal shares."""
    programs = tl.num_programs(0)
    equal = tl.maximum((total + programs - 1) // programs, least)
    found = 0
    for slack in tl.static_range(5):
        share = equal + (equal * slack + 15) // 16
        needed = tl.sum((tiles + share - 1) // share, 0) * KV_HEADS
        found = tl.where((found == 0) & (needed <= programs) & (total > 0), share, found)
    return found


@triton.jit
def _merge(
    out_item, partials, stats, first_sharer, parts,
    GROUP: tl.constexpr, DIM: tl.constexpr, FLAT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The weighted mean of an item's partial results; an item's query heads lie one after another in `out`."""
    flat = tl.arange(0, FLAT)
    real = flat < GROUP * DIM
    top = tl.full((FLAT,), float("-inf"), tl.float32)
    weight = tl.zeros((FLAT,), tl.float32)
    sums = tl.zeros((FLAT,), tl.float32)
    for start in range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        slot = (first_sharer + part) * 2 + (part == 0).to(tl.int32)
        mask = (part < parts)[:, None] & real[None, :]
        stat = stats + slot[:, None] * (2 * GROUP) + (flat // DIM)[None, :]
        # Not from the first-level cache: other multiprocessors wrote these.
        tops = tl.load(stat, mask=mask, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stat + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        partial = tl.load(
            partials + slot[:, None] * (GROUP * DIM) + flat[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.where(real, tl.maximum(top, tl.max(tops, 0)), 0.0)
        factors = tl.exp2(tops - new_top[None, :])
        fading = tl.exp2(top - new_top)
        weight = weight * fading + tl.sum(weights * factors, 0)
        sums = sums * fading + tl.sum(partial * factors, 0)
        top = new_top
    weight = tl.where(real, weight, 1.0)
    tl.store(out_item + flat, (sums / weight).to(out_item.dtype.element_ty), mask=real)


def _check_workspace(workspace: Workspace, programs: int, items: int, width: int) -> None:
    fits = workspace.partials.numel() >= 2 * programs * width and workspace.counters.numel() >= items
    require(fits, "decode: the workspace was made for fewer rows, heads or programs")
