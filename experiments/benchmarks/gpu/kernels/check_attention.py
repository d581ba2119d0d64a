"""Attention against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.inputs import DEVICE, QWEN3, Model, ints, pages
from kernels import reference
from kernels.batch import PagedBatch
from kernels.triton.decode import DecodeConfig, Workspace, decode
from kernels.triton.prefill import PrefillConfig, prefill
from kernels.triton.tuning import words


def check_decode(bench: Bench, dtype: torch.dtype, model: Model, config: DecodeConfig | None = None) -> None:
    contexts = [1, 17, 64, 65, 1000, 333, 4096, 5, 2047, 128, 700]
    scale = model.head_dim**-0.5
    workspace = Workspace.create(DEVICE, 64, model.heads, model.kv_heads, model.head_dim)

    def work() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(5):  # a race would show in some runs only
            pool, (table,) = pages(contexts, model, dtype)
            q = torch.randn(len(contexts) + 2, model.heads, model.head_dim, device=DEVICE).to(dtype)
            batch = PagedBatch([c - 1 for c in contexts], [1] * len(contexts), table.long(), model.block_size)
            wanted = reference.Attention(batch)(q[:-2].float(), pool, scale)
            padded = torch.cat((table, torch.full_like(table[:2], 1 << 29)))
            out = torch.full((len(q), model.heads * model.head_dim), math.nan, dtype=dtype, device=DEVICE)
            decode(q, pool, padded, ints([*contexts, 0, 0]), scale, out=out, workspace=workspace, config=config)
            assert not out[-2:].any(), "padded rows are not zero"
            assert not workspace.counters.any(), "counters were not left at zero"
            yield out[:-2], wanted

    shape = f"H{model.heads}/{model.kv_heads} D{model.head_dim} B{model.block_size}"
    bench.check(f"decode {shape}" + (f" {words(config)}" if config else ""), dtype, work)


def check_prefill(bench: Bench, dtype: torch.dtype, model: Model, config: PrefillConfig | None = None) -> None:
    slices = [(0, 1), (0, 300), (1000, 129), (513, 64), (77, 5)]
    scale = model.head_dim**-0.5

    def work() -> Iterator[tuple[Tensor, Tensor]]:
        starts, lengths = ([part[i] for part in slices] for i in (0, 1))
        contexts = [start + length for start, length in slices]
        pool, (table,) = pages(contexts, model, dtype)
        q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).to(dtype)
        wanted = reference.Attention(PagedBatch(starts, lengths, table.long(), model.block_size))(
            q.float(), pool, scale
        )
        out = torch.full((len(q), model.heads * model.head_dim), math.nan, dtype=dtype, device=DEVICE)
        offsets = ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
        prefill(q, pool, table, ints(contexts), offsets, scale, out=out, config=config)
        yield out, wanted

    shape = f"H{model.heads}/{model.kv_heads} D{model.head_dim} B{model.block_size}"
    bench.check(f"prefill {shape}" + (f" {words(config)}" if config else ""), dtype, work)


def check_mixed(bench: Bench, kind: Callable[[PagedBatch], Any], name: str) -> None:
    slices = [(700, 1), (31, 1), (4000, 1), (0, 512), (0, 512), (0, 300), (1000, 129), (9, 1)]
    model, scale = QWEN3, QWEN3.head_dim**-0.5

    def work() -> Iterator[tuple[Tensor, Tensor]]:
        starts, lengths = ([part[i] for part in slices] for i in (0, 1))
        pool, (table,) = pages([start + length for start, length in slices], model, torch.bfloat16)
        q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).bfloat16()
        batch = PagedBatch(starts, lengths, table.long(), model.block_size)
        for window in (None, 200):
            wanted = reference.Attention(batch)(q.float(), pool, scale, window)
            yield kind(batch)(q, pool, scale, window), wanted

    bench.check(name, torch.bfloat16, work)
