"""Tuning."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.check_attention import check_decode, check_prefill
from experiments.benchmarks.gpu.kernels.inputs import QWEN3
from kernels.autotune import Store
from kernels.triton import decode as decoding
from kernels.triton import linear as projecting
from kernels.triton import prefill as prefilling
from kernels.triton import tuning
from kernels.triton.decode import DecodeConfig
from kernels.triton.launch import shared_memory
from kernels.triton.linear import LinearConfig, Projection
from kernels.triton.prefill import PrefillConfig


def tune(bench: Bench, store: Store) -> None:
    """Everything that has a config; then what was found is checked, since some configs ran here only."""

    def report(line: str) -> None:
        bench.report.tuned.append(line.strip())

    sizes = QWEN3.sizes
    for rows in tuning.ROWS:
        bench.report.attempt(f"tune decode {rows}", partial(tuning.tune_decode, store, sizes, rows, report))
    bench.report.attempt("tune prefill", partial(tuning.tune_prefill, store, sizes, report))
    for tokens, name in product(tuning.TOKENS, sizes.projections):
        torch.cuda.empty_cache()
        bench.report.attempt(
            f"tune {name} {tokens}", partial(tuning.tune_projection, store, sizes, name, tokens, report)
        )
    for rows in tuning.ROWS:
        if (config := decode_tuned(store, rows)) is not None:
            check_decode(bench, torch.bfloat16, QWEN3, config)
    if (best := prefill_tuned(store)) is not None:
        check_prefill(bench, torch.bfloat16, QWEN3, best)


def decode_tuned(store: Store, rows: int) -> DecodeConfig | None:
    model = QWEN3
    key = decoding.bucket(torch.bfloat16, model.heads, model.kv_heads, model.head_dim, rows)
    return store.best(DecodeConfig, key, decoding.source())


def prefill_tuned(store: Store) -> PrefillConfig | None:
    model = QWEN3
    key = prefilling.bucket(torch.bfloat16, model.heads, model.kv_heads, model.head_dim)
    return store.best(PrefillConfig, key, prefilling.source())


def linear_tuned(store: Store, how: Projection, x: Tensor) -> LinearConfig:
    found = store.best(LinearConfig, projecting.bucket(how, x), projecting.source())
    return found or projecting.linear_config(x.dtype, len(x), x.shape[1], shared_memory(x.device))
