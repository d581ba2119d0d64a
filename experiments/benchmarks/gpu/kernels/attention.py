"""Times of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from experiments.benchmarks.gpu.ceilings import CUDNN
from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.inputs import DEVICE, QWEN3, Model, ints, kv_bytes, pages, prefill_flops
from experiments.benchmarks.gpu.kernels.tune import decode_tuned, prefill_tuned
from kernels import cudnn
from kernels.autotune import Store
from kernels.batch import PagedBatch
from kernels.triton import tuning
from kernels.triton.decode import DecodeConfig, Workspace, decode
from kernels.triton.prefill import PrefillConfig, prefill
from kernels.triton.timing import sets_for


def decode_calls(
    contexts: Sequence[int], config: DecodeConfig | None, hnd: bool = False, model: Model = QWEN3
) -> list[Callable[[], Tensor]]:
    dtype = torch.bfloat16
    spare = sets_for(kv_bytes(contexts, model, dtype))
    pool, tables = pages(contexts, model, dtype, spare)
    if hnd:
        pool = pool.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
    rows = len(contexts)
    workspace = Workspace.create(DEVICE, rows, model.heads, model.kv_heads, model.head_dim)
    lengths, scale = ints(contexts), model.head_dim**-0.5
    q = torch.randn(rows, model.heads, model.head_dim, device=DEVICE).to(dtype)
    out = torch.empty(rows, model.heads * model.head_dim, dtype=dtype, device=DEVICE)

    def call(table: Tensor) -> Callable[[], Tensor]:
        return partial(decode, q, pool, table, lengths, scale, out=out, workspace=workspace, config=config)

    return [call(table) for table in tables]


def prefill_calls(
    slices: Sequence[tuple[int, int]], config: PrefillConfig | None, model: Model = QWEN3
) -> list[Callable[[], Tensor]]:
    dtype = torch.bfloat16
    lengths = [length for _, length in slices]
    contexts = [start + length for start, length in slices]
    pool, tables = pages(contexts, model, dtype, sets_for(kv_bytes(contexts, model, dtype), 8))
    q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).to(dtype)
    out = torch.empty(len(q), model.heads * model.head_dim, dtype=dtype, device=DEVICE)
    offsets, lens = ints([0, *torch.tensor(lengths).cumsum(0).tolist()]), ints(contexts)

    def call(table: Tensor) -> Callable[[], Tensor]:
        return partial(prefill, q, pool, table, lens, offsets, model.head_dim**-0.5, out=out, config=config)

    return [call(table) for table in tables]


PREFILLS: dict[str, list[tuple[int, int]]] = {
    "1x512": [(0, 512)],
    "8x2048": [(0, 2048)] * 8,
    "512 after 4k": [(4096, 512)],
    "1x4096": [(0, 4096)],
}


def attention(bench: Bench, store: Store) -> None:
    model, prefills = QWEN3, prefill_tuned(store)
    decodes = {rows: decode_tuned(store, rows) for rows in tuning.ROWS}
    for rows, context in product((1, 8, 32, 128, 256), (512, 1024, 4096)):
        contexts = [context] * rows
        moved = kv_bytes(contexts, model, torch.bfloat16)
        config = decodes.get(rows)
        bench.time("decode", f"{rows} x {context}", partial(decode_calls, contexts, config), moved=moved)
    ragged = [int(c) for c in torch.randint(64, 4096, (128,), generator=torch.Generator().manual_seed(1))]
    moved = kv_bytes(ragged, model, torch.bfloat16)
    bench.time("decode", "128 ragged 64-4k", partial(decode_calls, ragged, decodes.get(128)), moved=moved)
    bench.time("decode head-major pool", "128 x 1024", partial(decode_calls, [1024] * 128, decodes.get(128), hnd=True),
               moved=kv_bytes([1024] * 128, model, torch.bfloat16))  # fmt: skip
    for case, slices in PREFILLS.items():
        bench.time(
            "prefill", case, partial(prefill_calls, slices, prefills), flops=prefill_flops(slices, model),
            ceiling=CUDNN,
        )  # fmt: skip
        if all(start == 0 for start, _ in slices):
            bench.time("prefill cudnn", case, partial(cudnn_calls, slices), flops=prefill_flops(slices, model),
                       ceiling=CUDNN)  # fmt: skip


def cudnn_calls(slices: Sequence[tuple[int, int]], model: Model = QWEN3) -> list[Callable[[], Tensor]]:
    lengths = [length for _, length in slices]
    pool, tables = pages(lengths, model, torch.bfloat16, sets_for(kv_bytes(lengths, model, torch.bfloat16), 8))
    q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).bfloat16()

    def call(table: Tensor) -> Callable[[], Tensor]:
        attend = cudnn.Attention(PagedBatch([0] * len(lengths), lengths, table.long(), model.block_size))
        return partial(attend, q, pool, model.head_dim**-0.5)

    return [call(table) for table in tables]
