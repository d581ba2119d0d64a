"""From the fused projection to attention's inputs in one pass: norm of heads, rotation, write to the KV pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.launch import contiguous_rows, early, power_of_two, require


def place_qkv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    heads: int,
    norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Queries, keys and values of a projection made ready: qkv [T, (H + 2K) * D] -> queries [T, H, D], a view of qkv.

    Queries are normed and rotated in place; keys normed, rotated and stored in the pool [blocks, block_size, 2, K, D]
    at the token's slot (block * block_size + offset), values stored beside them. A slot below 0 is padding: nothing is
    stored. `cos` and `sin` [positions, R/2] are tables by position of any float type; the first R elements of a head
    rotate, element i with element i + R/2, the rest pass. `norm` [H + K, D]: weights of every query and key head.
    Keys and values in `qkv` are left as they were. Rounded once, at the end.
    """
    tokens, width = qkv.shape
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[3], pool.shape[4]
    half = cos.shape[1]
    require(
        width == (heads + 2 * kv_heads) * head_dim, f"place_qkv: {width} columns for {heads} + 2 * {kv_heads} heads"
    )
    require(cos.shape == sin.shape and 2 * half <= head_dim, "place_qkv: cos and sin must be [positions, R/2], R <= D")
    require(qkv.dtype == pool.dtype, f"place_qkv: qkv is {qkv.dtype}, the pool {pool.dtype}")
    require(cos.stride(0) == sin.stride(0), "place_qkv: cos and sin must have the same row stride")
    contiguous_rows("place_qkv", qkv, cos, sin, pool, positions, slots)
    if norm is not None:
        require(norm.shape == (heads + kv_heads, head_dim), f"place_qkv: norm must be [{heads + kv_heads}, {head_dim}]")
        contiguous_rows("place_qkv", norm)
    if tokens:
        together = min(8, power_of_two(heads + 2 * kv_heads))
        rest = head_dim - 2 * half
        _place_qkv[(tokens, triton.cdiv(heads + 2 * kv_heads, together))](
            qkv, positions, slots, cos, sin, pool, qkv if norm is None else norm, eps,
            qkv.stride(0), cos.stride(0), pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
            0 if norm is None else norm.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, BLOCK_SIZE=block_size, TOGETHER=together,
            HALF=half, HALF_PAD=power_of_two(half), REST=rest, REST_PAD=power_of_two(max(rest, 1)),
            NORMED=norm is not None, num_warps=2, **early(qkv.device),
        )  # fmt: skip
    return qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))


@triton.jit
def _place_qkv(
    qkv, positions, slots, cos, sin, pool, norm, eps,
    qkv_row, table_row, pool_block, pool_token, pool_part, pool_head, norm_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`TOGETHER` heads of one token. A thread holds both elements of a pair, so writing in place races with nobody."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)

    pair = tl.arange(0, HALF_PAD)
    real = (head[:, None] < HEADS + 2 * KV_HEADS) & (pair[None, :] < HALF)
    source = qkv + token * qkv_row + head[:, None] * DIM
    left = tl.load(source + pair[None, :], mask=real, other=0.0).to(tl.float32)
    right = tl.load(source + HALF + pair[None, :], mask=real, other=0.0).to(tl.float32)
    if REST > 0:
        beyond = 2 * HALF + tl.arange(0, REST_PAD)
        real_rest = (head[:, None] < HEADS + 2 * KV_HEADS) & (beyond[None, :] < DIM)
        rest = tl.load(source + beyond[None, :], mask=real_rest, other=0.0).to(tl.float32)
    turns = tl.load(cos + position * table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    tilts = tl.load(sin + position * table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]

    is_value = (head >= HEADS + KV_HEADS)[:, None]
    if NORMED:
        squares = tl.sum(left * left + right * right, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        normed = real & (head[:, None] < HEADS + KV_HEADS)
        weights = norm + head[:, None] * norm_row
        by_left = tl.load(weights + pair[None, :], mask=normed, other=0.0).to(tl.float32)
        by_right = tl.load(weights + HALF + pair[None, :], mask=normed, other=0.0).to(tl.float32)
        left = tl.where(is_value, left, left * factor * by_left)
        right = tl.where(is_value, right, right * factor * by_right)
        if REST > 0:
            normed_rest = real_rest & (head[:, None] < HEADS + KV_HEADS)
            by_rest = tl.load(weights + beyond[None, :], mask=normed_rest, other=0.0).to(tl.float32)
            rest = tl.where(is_value, rest, rest * factor * by_rest)

    rotated_left = tl.where(is_value, left, left * turns - right * tilts).to(qkv.dtype.element_ty)
    rotated_right = tl.where(is_value, right, right * turns + left * tilts).to(qkv.dtype.element_ty)

    is_query = (head < HEADS)[:, None]
    tl.store(source + pair[None, :], rotated_left, mask=real & is_query)
    tl.store(source + HALF + pair[None, :], rotated_right, mask=real & is_query)
    stored = (head >= tl.where(slot >= 0, HEADS, HEADS + 2 * KV_HEADS))[:, None]
    kv_head = tl.where(is_value, head[:, None] - HEADS - KV_HEADS, head[:, None] - HEADS)
    part = tl.where(is_value, pool_part, 0)
    target = pool + (slot // BLOCK_SIZE) * pool_block + (slot % BLOCK_SIZE) * pool_token + part + kv_head * pool_head
    tl.store(target + pair[None, :], rotated_left, mask=real & stored)
    tl.store(target + HALF + pair[None, :], rotated_right, mask=real & stored)
    if REST > 0:
        kept = rest.to(qkv.dtype.element_ty)
        tl.store(source + beyond[None, :], kept, mask=real_rest & is_query)
        tl.store(target + beyond[None, :], kept, mask=real_rest & stored)
