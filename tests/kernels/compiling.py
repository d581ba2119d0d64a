"""Compiles kernels for GPUs that are not there: what the calls below would launch, for one architecture.

python -m tests.kernels.compiling CAPABILITY   (with TRITON_INTERPRET=0) prints a line of JSON for each launch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.batch import SamplingRows
from kernels.triton import (
    activation,
    decode,
    experts,
    latent,
    launch,
    linear,
    norm,
    pairs,
    peers,
    prefill,
    qkv,
    ring,
    routing,
    sampling,
)

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have (CUDA C++ programming guide 13.0, table of compute capabilities)."""

BF16, WIDTH, HEADS, KV_HEADS = torch.bfloat16, 4096, 32, 8


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(head_dim: int, dtype: torch.dtype) -> None:
    pool = torch.zeros(8, 16, 2, KV_HEADS, head_dim, dtype=dtype)
    for rows in (1, 64) if dtype == BF16 else (64,):
        q, tables = torch.zeros(rows, HEADS, head_dim, dtype=dtype), torch.zeros(rows, 8, dtype=torch.int32)
        decode.decode(q, pool, tables, torch.full((rows,), 100, dtype=torch.int32), 0.1)
    q = torch.zeros(100, HEADS, head_dim, dtype=dtype)
    prefill.prefill(q, pool, torch.zeros(1, 8, dtype=torch.int32), ints(100), ints(0, 100), 0.1)


def projections(dtype: torch.dtype) -> None:
    linears = linear.Linears()
    weight, ones = torch.zeros(512, WIDTH, dtype=dtype), torch.ones(WIDTH, dtype=dtype)
    for tokens in (1, 16, 32):
        x = torch.zeros(tokens, WIDTH, dtype=dtype)
        linears.norm_gated(ones, 1e-6, weight, None)(x)
        linears.add_linear(weight, None)(x, torch.zeros(tokens, 512, dtype=dtype))


def mixture(dtype: torch.dtype, tokens: int) -> None:
    mix = experts.Experts(torch.zeros(8, 1536, 2048, dtype=dtype), torch.zeros(8, 2048, 768, dtype=dtype))
    x = torch.zeros(tokens, 2048, dtype=dtype)
    mix(x, *routing.route(torch.zeros(tokens, 8, dtype=dtype), 4, True), x.clone())


def latents(dtype: torch.dtype, heads: int) -> None:
    """DeepSeek's sizes."""
    pool, tables = torch.zeros(8, 16, 576, dtype=dtype), torch.zeros(4, 8, dtype=torch.int32)
    q = torch.zeros(100, heads, 576, dtype=dtype)
    latent.latent_decode(q[:4], pool, tables, ints(100, 100, 100, 100), 512, 0.1)
    latent.latent_prefill(q, pool, tables, ints(100), ints(0, 100), 512, 0.1)
    places, table = torch.arange(4), torch.zeros(64, 32)
    queries, made = torch.zeros(4, heads, 192, dtype=dtype), torch.zeros(4, 2112, dtype=dtype)[:, 1536:]
    latent.place_latent(queries, made, places, places, table, table, pool, torch.ones(512, dtype=dtype), 1e-6)


def others() -> None:
    x = torch.zeros(4, WIDTH, dtype=BF16)
    norm.add_rms_norm(x, x.clone(), x[0], 1e-6)
    activation.embedding(ints(1, 2), torch.zeros(10, WIDTH, dtype=BF16))
    fused = torch.zeros(4, (HEADS + 2 * KV_HEADS) * 128, dtype=BF16)
    pool, table = torch.zeros(8, 16, 2, KV_HEADS, 128, dtype=BF16), torch.zeros(64, 64)
    places = torch.arange(4)
    qkv.place_qkv(fused, places, places, table, table, pool, HEADS, torch.ones(HEADS + KV_HEADS, 128, dtype=BF16))


def draws() -> None:
    logits, some = torch.zeros(4, 151936, dtype=BF16), torch.ones(4)
    sampling.pick(logits)
    sampling.pick(logits, SamplingRows(some, torch.arange(4), torch.arange(4), ints(5, 5, 5, 5), some, some))


def exchanges() -> None:
    """A step's of Qwen3-32B, as the second of two ranks."""
    places, state = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    window, x = peers.Window(1, 2, places, state, 1 << 20, 132), torch.zeros(32, 5120, dtype=BF16)
    peers.add_sum(window, x, x.clone())
    peers.add_sum_norm(window, x, x.clone(), torch.ones(5120, dtype=BF16), 1e-6)
    peers.gather(window, x)
    peers.scatter_sum(window, x)
    end = ring.Ring(places[:1], places[1:], state, 1 << 20, 2, 132)
    ring.put(end, x)
    ring.take(end, x)


CALLS: tuple[Callable[[], None], ...] = (
    lambda: attention(128, BF16),
    lambda: attention(256, BF16),
    lambda: attention(128, torch.float32),
    lambda: projections(BF16),
    lambda: mixture(BF16, 1),
    lambda: mixture(BF16, 256),
    lambda: latents(BF16, 128),
)
TIGHT: tuple[Callable[[], None], ...] = (
    lambda: attention(256, torch.float32),
    lambda: mixture(torch.float32, 256),
    lambda: latents(torch.float32, 16),
)
"""The tiles are the same where there is more shared memory, and these take longest."""

AMPLE: tuple[Callable[[], None], ...] = (others, draws, exchanges)
"""These need no shared memory to speak of."""


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    """Every launch of the calls once, compiled, with the shared memory that it needs."""
    launches: dict[tuple[Any, ...], tuple[JITFunction[Any], ASTSource, dict[str, Any]]] = {}
    run = JITFunction.run

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        named = dict(zip(self.arg_names, arguments, strict=False)) | {
            k: options.pop(k) for k in [*options] if k in self.arg_names
        }
        source = _source(self, named)
        launches[self.__name__, *map(str, (source.signature, source.constants, source.attrs)), str(options)] = (
            self,
            source,
            options,
        )

    JITFunction.run = note  # type: ignore[method-assign]
    launch.early = lambda device: {"EARLY": capability >= 90}
    launch.shared_memory = lambda device: SHARED[capability]
    for module in (activation, decode, experts, linear, norm, pairs, peers, qkv, ring, routing):
        module.early = launch.early
    for module in (experts, latent, linear, prefill):
        module.shared_memory = launch.shared_memory
    try:
        for call in (*CALLS, *(AMPLE if capability >= 90 else TIGHT)):
            call()
    finally:
        JITFunction.run = run
    for kernel, source, options in launches.values():
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        yield {
            "kernel": kernel.__name__,
            "shared": found.metadata.shared,
            "options": options,
            "constants": str(source.constants),
        }


def _source(kernel: JITFunction[Any], named: dict[str, Any]) -> ASTSource:
    """As a launch on a GPU would specialise it: aligned pointers, and integers by what divides them."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = named[parameter.name]
        kind, aligned = _type(value, parameter.do_not_specialize)
        if parameter.is_constexpr or kind == "constexpr":
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        signature[parameter.name] = kind
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _type(value: Any, plain: bool) -> tuple[str, bool]:
    names = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.int16: "i16",
    }
    if isinstance(value, torch.Tensor):
        return f"*{names[value.dtype]}", True
    if isinstance(value, float):
        return "fp32", False
    if value is None or (value == 1 and not plain):
        return "constexpr", False
    return "i32", not plain and value % 16 == 0


if __name__ == "__main__":
    for found in compiled(int(sys.argv[1])):
        print(json.dumps(found))
