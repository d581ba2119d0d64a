"""Times of everything but attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.inputs import DEVICE, QWEN3, pages, sampling_rows
from experiments.benchmarks.gpu.kernels.tune import linear_tuned
from kernels.autotune import Store
from kernels.triton import activation, norm, qkv, sampling
from kernels.triton import linear as projecting
from kernels.triton.linear import Projection, Scratches, project
from kernels.triton.timing import sets_for


def sample(bench: Bench, store: Store) -> None:
    for rows in (1, 32, 128, 256):
        moved = rows * QWEN3.vocabulary * 2.0

        def inputs(rows: int = rows) -> list[Tensor]:
            size = (rows, QWEN3.vocabulary)
            return [
                (torch.randn(size, device=DEVICE) * 3).bfloat16() for _ in range(sets_for(rows * QWEN3.vocabulary * 2))
            ]

        def greedy(inputs: Callable[[], list[Tensor]] = inputs) -> list[Callable[[], Any]]:
            return [partial(sampling.pick, x) for x in inputs()]

        def library(inputs: Callable[[], list[Tensor]] = inputs) -> list[Callable[[], Any]]:
            return [partial(torch.argmax, x, -1) for x in inputs()]

        def drawn(
            rows: int = rows, inputs: Callable[[], list[Tensor]] = inputs, filtered: bool = False
        ) -> list[Callable[[], Any]]:
            how = sampling_rows(rows, filtered=filtered)
            return [partial(sampling.pick, x, how) for x in inputs()]

        case = f"{rows} rows"
        bench.time("pick greedy", case, greedy, moved=moved)
        bench.time("torch argmax", case, library, moved=moved)
        bench.time("pick temperature", case, drawn, moved=moved)
        bench.time("pick top-k top-p", case, partial(drawn, filtered=True), moved=moved)


def linear(bench: Bench, store: Store) -> None:
    """The projections as tuned, beside cuBLAS on the bare product."""
    for tokens, (name, (outputs, inputs, normed, gated)) in product((1, 32, 128, 256), QWEN3.sizes.projections.items()):
        size = outputs * inputs * 2

        def weights(size: int = size, outputs: int = outputs, inputs: int = inputs) -> list[Tensor]:
            return [torch.randn(outputs, inputs, device=DEVICE).bfloat16() * 0.02 for _ in range(sets_for(size, 8))]

        def bare(tokens: int = tokens, inputs: int = inputs, weights: Any = weights) -> list[Callable[[], Any]]:
            x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
            return [partial(F.linear, x, w) for w in weights()]

        def ours(
            tokens: int = tokens, inputs: int = inputs, weights: Any = weights, normed: bool = normed,
            gated: bool = gated,
        ) -> list[Callable[[], Any]]:  # fmt: skip
            x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
            by = torch.ones(inputs, device=DEVICE).bfloat16() if normed else None
            scratches = Scratches()
            ways = [Projection(scratches, weight, None, by, 1e-6, gated) for weight in weights()]
            config = linear_tuned(store, ways[0], x)
            return [partial(project, how, x, None, config) for how in ways]

        bench.time(f"cublas {name}", f"{tokens} rows", bare, moved=size)
        if tokens <= projecting.MOST_TOKENS:
            bench.time(f"ours {name}", f"{tokens} rows", ours, moved=size)


def small(bench: Bench, store: Store) -> None:
    model, dtype = QWEN3, torch.bfloat16
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    for rows in (1, 32, 128, 256, 2048):
        case = f"{rows} rows"

        def random(*size: int) -> Tensor:
            return torch.randn(size, device=DEVICE).to(dtype)

        def norms(rows: int = rows) -> list[Callable[[], Any]]:
            size = rows * model.hidden * 2
            weight = random(model.hidden)
            pairs = [(random(rows, model.hidden), random(rows, model.hidden)) for _ in range(sets_for(3 * size))]
            return [partial(norm.add_rms_norm, x, r, weight, 1e-6) for x, r in pairs]

        def activations(rows: int = rows) -> list[Callable[[], Any]]:
            inputs = [random(rows, 2 * model.intermediate) for _ in range(sets_for(rows * 3 * model.intermediate * 2))]
            return [partial(activation.silu_mul, x) for x in inputs]

        def places(rows: int = rows) -> list[Callable[[], Any]]:
            angles = torch.rand(5000, model.head_dim // 2, device=DEVICE)
            cos, sin = angles.cos(), angles.sin()
            pool, _ = pages([16 * rows * 4], model, dtype)
            weights = random(model.heads + model.kv_heads, model.head_dim)
            inputs = [random(rows, width) for _ in range(sets_for(rows * width * 2))]
            positions = torch.randint(0, 5000, (rows,), device=DEVICE)
            slots = torch.randperm((len(pool) - 1) * model.block_size, device=DEVICE)[:rows]
            return [partial(qkv.place_qkv, x, positions, slots, cos, sin, pool, model.heads, weights) for x in inputs]

        bench.time("add_rms_norm", case, norms, moved=4.0 * rows * model.hidden * 2)
        bench.time("silu_mul", case, activations, moved=3.0 * rows * model.intermediate * 2)
        bench.time("place_qkv", case, places, moved=2.0 * rows * width * 2)
