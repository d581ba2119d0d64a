"""What all kernels ask of a paged KV pool.

A pool is addressed by strides: [blocks, block_size, 2, K, D] in any order of memory whose last axis is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.launch import FLOATS, contiguous_rows, require

MOST_ROWS = 1024
"""Rows or slices of one call: every program holds all their lengths in registers."""

MOST_DIM = 256


def check(q: Tensor, pool: Tensor, tables: Tensor, contexts: Tensor) -> None:
    require(q.dim() == 3 and pool.dim() == 5 and pool.shape[2] == 2, "attention: q is [T, H, D], pool [B, N, 2, K, D]")
    require(q.shape[2] == pool.shape[4], f"attention: head size {q.shape[2]} of q, {pool.shape[4]} of the pool")
    require(q.shape[1] % pool.shape[3] == 0, f"attention: {q.shape[1]} query heads over {pool.shape[3]} KV heads")
    require(q.dtype == pool.dtype and q.dtype in FLOATS, f"attention: q is {q.dtype}, the pool {pool.dtype}")
    require(q.shape[2] <= 256, f"attention: head size {q.shape[2]}, at most 256")
    ints = tables.dtype == contexts.dtype == torch.int32
    require(ints and len(tables) >= len(contexts), "attention: tables and contexts must be int32, a table a context")
    contiguous_rows("attention", q, pool, tables, contexts)
