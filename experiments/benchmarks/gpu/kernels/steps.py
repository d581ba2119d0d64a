"""Whole steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.gpu.ceilings import MATMUL
from experiments.benchmarks.gpu.kernels.bench import Bench
from experiments.benchmarks.gpu.kernels.inputs import DEVICE, QWEN3, Model, ints, kv_bytes, prefill_flops
from experiments.benchmarks.gpu.kernels.tune import decode_tuned, linear_tuned
from kernels import cudnn
from kernels.autotune import Store
from kernels.batch import PagedBatch
from kernels.triton import activation, launch, qkv, sampling
from kernels.triton import linear as projecting
from kernels.triton.attention import Attention
from kernels.triton.decode import Workspace, decode
from kernels.triton.linear import Linears


class Steps:
    """A model of random weights, all on the device: nothing of the engine, only what its layers will launch."""

    def __init__(self, model: Model, make: Linears) -> None:
        self.model = model
        self.make = make

    def weights(self) -> None:
        """As random as timing needs; ones for norms."""
        model, sizes = self.model, self.model.sizes.projections

        def random(name: str) -> Tensor:
            return torch.empty(sizes[name][:2], dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)

        ones = torch.ones(model.hidden, dtype=torch.bfloat16, device=DEVICE)
        self.ones = ones
        self.raw = [[random(name) for name in ("qkv", "out", "gate_up", "down")] for _ in range(model.layers)]
        self.table = random("head")
        self.qk = torch.ones(model.heads + model.kv_heads, model.head_dim, dtype=torch.bfloat16, device=DEVICE)
        angles = torch.arange(8192, device=DEVICE)[:, None] * torch.rand(model.head_dim // 2, device=DEVICE)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.use(self.make)

    def use(self, make: Any) -> None:
        """Projections by another maker."""
        self.layers = [
            (
                make.norm_linear(self.ones, 1e-6, qkv_weight, None), make.add_linear(out, None),
                make.norm_gated(self.ones, 1e-6, gate_up, None), make.add_linear(down, None),
            )
            for qkv_weight, out, gate_up, down in self.raw
        ]  # fmt: skip
        self.head = make.norm_linear(self.ones, 1e-6, self.table, None)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Any, pools: Tensor, rows: Any) -> Any:
        """Logits of some rows [rows, V]."""
        model = self.model
        h = activation.embedding(tokens, self.table)
        for (project_qkv, out, gate_up, down), pool in zip(self.layers, pools, strict=True):
            q = qkv.place_qkv(project_qkv(h), positions, slots, self.cos, self.sin, pool, model.heads, self.qk, 1e-6)
            h = out(attend(q, pool, model.head_dim**-0.5), h)
            h = down(gate_up(h), h)
        return self.head(h if rows is None else h[rows])


def steps(bench: Bench, store: Store) -> None:
    """Decode steps in a graph: as tuned, with cuBLAS, with no early starts. Prefill steps launched one by one."""
    model = QWEN3
    tuned = Linears(partial(linear_tuned, store))
    kinds = {"tuned": tuned, "cublas": Linears(projecting.by_library), "in turn": tuned}
    maker = Steps(model, tuned)
    maker.weights()
    for rows, context in ((1, 512), (32, 1024), (128, 1024), (256, 1024)):
        moved = model.weights * 2.0 + kv_bytes([context] * rows, model, torch.bfloat16) * model.layers
        pools = bench.report.attempt(f"pool {rows} x {context}", partial(step_pools, model, rows, context))
        if pools is None:
            continue
        found: dict[str, Tensor] = {}
        for name, make in kinds.items():
            calls = partial(_step_calls, maker, make, store, (rows, context), pools, partial(found.__setitem__, name))
            launch.EARLY = name != "in turn"
            bench.time(f"step {name}", f"{rows} x {context}", calls, moved=moved)
            launch.EARLY = True
        # Two computations of 36 layers in bf16 differ by more than one kernel may; the same one does not at all.
        for name, other, bound in (("tuned", "cublas", 0.1), ("in turn", "tuned", 1e-9)):
            if name in found and other in found:
                pairs = [(found[name], found[other].float())]
                bench.check(f"step {rows}, {name} against {other}", torch.bfloat16, partial(iter, pairs), bound)
        del pools
        torch.cuda.empty_cache()
    maker.use(kinds["cublas"])
    for name, kind in (("triton", Attention), ("cudnn", cudnn.Attention)):
        bench.report.attempt(f"prefill step {name}", partial(prefill_step, bench, maker, name, kind))


def _step_calls(
    maker: Steps, make: Any, store: Store, size: tuple[int, int], pools: Tensor, keep: Callable[[Tensor], None]
) -> list[Callable[[], Any]]:
    maker.use(make)
    step = decode_step(maker, store, *size, pools)
    keep(step()[0])
    return [step]


def step_pools(model: Model, rows: int, context: int) -> Tensor:
    blocks = rows * (-(-context // model.block_size))
    size = (model.layers, blocks, model.block_size, 2, model.kv_heads, model.head_dim)
    return torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_()


def decode_step(maker: Steps, store: Store, rows: int, context: int, pools: Tensor) -> Callable[[], Any]:
    model = maker.model
    torch.manual_seed(rows)  # the same step whatever the projections
    width = pools.shape[1] // rows
    table = torch.randperm(pools.shape[1], device=DEVICE).int().view(rows, width)
    workspace = Workspace.create(DEVICE, rows, model.heads, model.kv_heads, model.head_dim)
    tokens = torch.randint(0, model.vocabulary, (rows,), device=DEVICE)
    positions = torch.full((rows,), context - 1, device=DEVICE)
    slots = table[:, (context - 1) // model.block_size].long() * model.block_size + (context - 1) % model.block_size
    lengths = ints([context] * rows)
    config = decode_tuned(store, rows)

    def attend(q: Tensor, pool: Tensor, scale: float) -> Tensor:
        return decode(q, pool, table, lengths, scale, workspace=workspace, config=config)

    def step() -> tuple[Tensor, Tensor]:
        logits = maker(tokens, positions, slots, attend, pools, None)
        return logits, sampling.pick(logits)

    return step


def prefill_step(bench: Bench, maker: Steps, name: str, kind: Any) -> None:
    model, count, length = maker.model, 8, 2048
    pools = step_pools(model, count, length)
    table = torch.randperm(pools.shape[1], device=DEVICE).view(count, -1)
    places = torch.arange(length, device=DEVICE)
    positions = places.repeat(count)
    slots = (table[:, places // model.block_size] * model.block_size + places % model.block_size).flatten()
    tokens = torch.randint(0, model.vocabulary, (count * length,), device=DEVICE)
    last = torch.arange(1, count + 1, device=DEVICE) * length - 1
    attend = kind(PagedBatch([0] * count, [length] * count, table, model.block_size))
    spans = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        sampling.pick(maker(tokens, positions, slots, attend, pools, last))
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3)
    flops = 2.0 * (model.weights - model.vocabulary * model.hidden) * count * length
    flops += prefill_flops([(0, length)] * count, model) * model.layers
    rate = flops / min(spans) / 1e6
    bench.report.timings.append(
        {"name": f"step prefill {name}", "case": f"{count} x {length}", "us": min(spans), "tflops": rate,
         "ceiling": MATMUL / 1e12, "share": rate * 1e12 / MATMUL}
    )  # fmt: skip
