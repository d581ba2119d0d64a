"""Every check of every type and shape."""

from __future__ import annotations

from functools import partial

import torch

from experiments.benchmarks.gpu.kernels.bench import BOUNDS, Bench, Rehearsal
from experiments.benchmarks.gpu.kernels.check_attention import check_decode, check_mixed, check_prefill
from experiments.benchmarks.gpu.kernels.check_small import check_linear, check_sampling, check_small
from experiments.benchmarks.gpu.kernels.inputs import QWEN3, Model
from experiments.benchmarks.gpu.kernels.report import Report
from kernels import cudnn
from kernels.autotune import Store
from kernels.triton import tuning
from kernels.triton.attention import Attention


def checks(bench: Bench, store: Store) -> None:
    tuning.compile_ahead([partial(_checks, Rehearsal(Report()))])
    _checks(bench)


def _checks(bench: Bench) -> None:
    for dtype in BOUNDS:
        check_decode(bench, dtype, QWEN3)
        check_prefill(bench, dtype, QWEN3)
        check_sampling(bench, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        check_small(bench, dtype)
        check_linear(bench, dtype)
    check_mixed(bench, Attention, "mixed batch, triton")
    check_mixed(bench, cudnn.Attention, "mixed batch, cudnn")
    shapes = [
        Model(heads=8, kv_heads=1, head_dim=64), Model(heads=4, kv_heads=4, head_dim=80, block_size=32),
        Model(heads=14, kv_heads=2, head_dim=96, block_size=64), Model(heads=16, kv_heads=2, head_dim=256),
        Model(heads=16, kv_heads=1, head_dim=128, block_size=128),
    ]  # fmt: skip
    for model in shapes:
        check_decode(bench, torch.bfloat16, model)
        check_prefill(bench, torch.bfloat16, model)
