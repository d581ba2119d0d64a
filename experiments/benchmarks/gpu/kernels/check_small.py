"""Norms ... against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.inputs import DEVICE, QWEN3, Model, sampling_rows
from kernels import reference
from kernels.batch import SamplingRows
from kernels.triton import activation, norm, qkv, sampling
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig, Projection, Scratches, project


def check_small(bench: Bench, dtype: torch.dtype) -> None:
    model = QWEN3

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE).to(dtype)

    def norms() -> Iterator[tuple[Tensor, Tensor]]:
        for rows, width in ((1, 4096), (33, 4096), (7, 5120), (5, 896)):
            x, residual, weight = random(rows, width), random(rows, width), random(width)
            yield norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x.float(), weight.float(), 1e-6)
            wanted = reference.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-6)
            out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
            yield out, wanted[0]
            yield total, wanted[1]

    def activations() -> Iterator[tuple[Tensor, Tensor]]:
        for rows, width in ((1, 12288), (33, 12288), (5, 1000)):
            x = random(rows, 2 * width)
            yield activation.silu_mul(x), reference.silu_mul(x.float())

    def embeddings() -> Iterator[tuple[Tensor, Tensor]]:
        table = random(1000, 4096)
        tokens = torch.randint(0, 1000, (77,), device=DEVICE)
        yield activation.embedding(tokens, table), table[tokens].float()

    def places() -> Iterator[tuple[Tensor, Tensor]]:
        for normed, rotary, head_dim in product((False, True), (128, 64), (128, 80)):
            yield from _placed(dtype, replace(model, head_dim=head_dim), min(rotary, head_dim), normed)

    bench.check("norms", dtype, norms)
    bench.check("silu_mul", dtype, activations)
    bench.check("embedding", dtype, embeddings)
    bench.check("place_qkv", dtype, places)


def _placed(dtype: torch.dtype, model: Model, rotary: int, normed: bool) -> Iterator[tuple[Tensor, Tensor]]:
    heads, kv_heads, dim, tokens = model.heads, model.kv_heads, model.head_dim, 37
    x = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    pool = torch.full((9, model.block_size, 2, kv_heads, dim), math.nan, dtype=dtype, device=DEVICE)
    angles = torch.arange(500, device=DEVICE)[:, None] * torch.rand(rotary // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 500, (tokens,), device=DEVICE)
    slots = torch.randperm(8 * model.block_size, device=DEVICE)[:tokens]
    slots[3] = -1
    weights = torch.randn(heads + kv_heads, dim, device=DEVICE).to(dtype) if normed else None
    wide = x.float().unflatten(1, (-1, dim)).clone()
    if weights is not None:
        wide[:, : heads + kv_heads] = reference.rms_norm(wide[:, : heads + kv_heads], weights.float(), 1e-6)
    turned, half = wide[:, : heads + kv_heads], rotary // 2
    pairs = torch.complex(turned[..., :half], turned[..., half:rotary])
    pairs = pairs * torch.complex(cos[positions], sin[positions])[:, None]
    turned[..., :rotary] = torch.cat((pairs.real, pairs.imag), -1)
    out = qkv.place_qkv(x, positions, slots, cos, sin, pool, heads, weights)
    yield out, wide[:, :heads]
    kept = slots >= 0
    stored = pool.view(-1, 2, kv_heads, dim)[slots[kept]]
    yield stored[:, 0], wide[kept][:, heads : heads + kv_heads]
    yield stored[:, 1], wide[kept][:, heads + kv_heads :]
    assert int(pool.isnan().sum()) == pool.numel() - (tokens - 1) * 2 * kv_heads * dim, "stored beyond the slots"


def check_sampling(bench: Bench, dtype: torch.dtype) -> None:
    """Tokens are integers: the error is the share of rows that differ, and none may, but at a boundary's rounding."""
    model, rows = QWEN3, 24

    def work() -> Iterator[tuple[Tensor, Tensor]]:
        x = (torch.randn(rows, model.vocabulary, device=DEVICE) * 3).to(dtype)
        how = sampling_rows(rows, filtered=True)
        plain = SamplingRows(how.temperature, how.seeds, how.positions)
        ones = torch.ones(rows, device=DEVICE)
        yield 1 + (sampling.pick(x) != x.argmax(-1)).float(), ones
        for rule in (plain, how):
            differ = sampling.pick(x, rule) != reference.pick(x, rule)
            # A number that falls within rounding of a boundary (some 1e-6 of the whole) may pick the neighbour.
            yield 1 + (differ.sum() > 1).float() + 0 * ones, ones
        out, wanted = sampling.logprobs(x, x.argmax(-1), 5), reference.logprobs(x, x.argmax(-1), 5)
        yield out[1], wanted[1]

    bench.check("sampling", dtype, work)


def check_linear(bench: Bench, dtype: torch.dtype) -> None:
    """Every way that takes the number of tokens, with everything around it."""
    ways = {
        MATVEC: ([1], LinearConfig(MATVEC, 8, 512)),
        SKINNY: ([1, 33], LinearConfig(SKINNY, 64, 128 if dtype.itemsize == 2 else 32, stages=3)),
        CUBLAS: ([1, 300], LinearConfig(CUBLAS)),
    }
    for method, (counts, config) in ways.items():

        def work(counts: Sequence[int] = counts, config: LinearConfig = config) -> Iterator[tuple[Tensor, Tensor]]:
            scratches = Scratches()
            for tokens, kind in product(counts, range(4)):
                outputs, inputs = (4096, 4096) if kind in (0, 2) else (1000, 1560)
                yield _projected(dtype, tokens, outputs, inputs, kind, config, scratches)
            assert not any(scratch.counters.any() for scratch in scratches.made.values()), "counters are not zero"

        bench.check(f"projection {method}", dtype, work)


def _projected(
    dtype: torch.dtype, tokens: int, outputs: int, inputs: int, kind: int, config: LinearConfig, scratches: Scratches
) -> tuple[Tensor, Tensor]:
    """Kinds: plain; normed; normed and gated with bias; added."""
    gated = kind == 2
    rows = outputs * (2 if gated else 1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE).to(dtype)

    weight, x = random(rows, inputs), random(tokens, inputs)
    bias = random(rows) if gated else None
    norm_weight = random(inputs) if kind in (1, 2) else None
    residual = random(tokens, outputs) if kind == 3 else None
    wide = x.float() if norm_weight is None else reference.rms_norm(x.float(), norm_weight.float(), 1e-6)
    wanted = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if gated:
        wanted = reference.silu_mul(wanted)
    if residual is not None:
        wanted = wanted + residual.float()
    how = Projection(scratches, weight, bias, norm_weight, 1e-6, gated)
    return project(how, x, residual, config), wanted
