"""Every Triton kernel on a real GPU, in one run: checked against the reference, tuned, timed, written as JSON.

    python3 experiments/benchmarks/gpu_kernels.py --out OUT

It imports torch, triton, numpy and our kernels. A kernel that fails is reported with its error's last line, and the
others go on. The shape that is timed is Qwen3-8B's; ceilings are those measured on an H200 (copy 4.3 TB/s, bf16 matrix
product 790 TFLOP/s, cuDNN causal attention 524 TFLOP/s).

Method: inputs are fresh random numbers, outputs and unused KV are filled with NaN before each check. Timings are
medians of graph replays between CUDA events; one graph holds many launches, which go round several sets of inputs
that together are larger than the second-level cache.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from torch import Tensor

from kernels import cudnn, reference
from kernels.batch import PagedBatch, SamplingRows
from kernels.triton import activation, norm, qkv, sampling
from kernels.triton.attention import Attention
from kernels.triton.decode import DecodeConfig, Workspace, decode
from kernels.triton.prefill import PrefillConfig, prefill

COPY_GBS = 4300.0
MATMUL_TFLOPS = 790.0
CUDNN_TFLOPS = 524.0
COLD_BYTES = 256 << 20
"""What sets of inputs must take together so that none is found in the cache: four times the H200's."""

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative Frobenius error."""

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Model:
    """The sizes that are timed."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 12288
    vocabulary: int = 151936
    layers: int = 36
    block_size: int = 16


QWEN3 = Model()


@dataclass
class Report:
    """What the run found, in the order found."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    tuned: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out `work`; a failure is a line of the report, not the end of the run."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever a kernel or its compiler raises, the others go on
            lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            place = traceback.extract_tb(error.__traceback__)[-1]
            last = f"{type(error).__name__}: {lines[-1].strip()[:200]}"
            self.failures.append({"name": name, "error": last, "at": f"{Path(place.filename).name}:{place.lineno}"})
            print(f"FAILED {name}: {last}", flush=True)
            return None


# --- measuring


def microseconds(calls: Sequence[Callable[[], Any]], *, repeats: int = 0, replays: int = 7) -> float:
    """Median time of one call; `calls` do the same on different inputs and take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    rough = max((time.perf_counter() - started) / len(calls), 2e-6)
    repeats = repeats or max(1, min(100, math.ceil(4e-3 / rough / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(spans)


def error(out: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error in double precision; NaN anywhere is NaN."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


def sets_for(size: int, most: int = 64) -> int:
    """Sets of inputs of `size` bytes that together do not fit the cache."""
    return max(1, min(most, math.ceil(COLD_BYTES / max(size, 1))))


class Bench:
    """Checks and timings that go to one report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def check(self, name: str, dtype: torch.dtype, work: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        """`work` yields (output, float32 reference)."""

        def run() -> None:
            worst = max((error(out, wanted) for out, wanted in work()), key=lambda e: math.inf if math.isnan(e) else e)
            good = worst < BOUNDS[dtype]
            self.report.checks.append({"name": name, "dtype": _short(dtype), "error": worst, "good": good})
            if not good:
                print(f"WRONG {name} {_short(dtype)}: error {worst:.2e}, bound {BOUNDS[dtype]:.0e}", flush=True)

        self.report.attempt(f"check {name} {_short(dtype)}", run)

    def time(
        self,
        name: str,
        case: str,
        calls: Callable[[], Sequence[Callable[[], Any]]],
        *,
        moved: float = 0.0,
        flops: float = 0.0,
        ceiling: float = MATMUL_TFLOPS,
    ) -> None:
        """`moved` bytes or `flops` operations a call, the ceiling in GB/s or TFLOP/s."""

        def run() -> None:
            span = microseconds(calls())
            row: dict[str, Any] = {"name": name, "case": case, "us": span}
            if flops:
                row |= {"tflops": flops / span / 1e6, "ceiling": ceiling, "share": flops / span / 1e6 / ceiling}
            elif moved:
                row |= {"gbs": moved / span / 1e3, "ceiling": COPY_GBS, "share": moved / span / 1e3 / COPY_GBS}
            self.report.timings.append(row)

        self.report.attempt(f"time {name} {case}", run)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- paged inputs


def pages(contexts: Sequence[int], model: Model, dtype: torch.dtype, spare: int = 1) -> tuple[Tensor, list[Tensor]]:
    """A pool of random KV, NaN beyond every context, and `spare` block tables [rows, blocks] over disjoint blocks."""
    size = model.block_size
    widths = [-(-context // size) for context in contexts]
    used = sum(widths)
    blocks = used * spare + 1
    pool = torch.empty(blocks, size, 2, model.kv_heads, model.head_dim, dtype=dtype, device=DEVICE).normal_()
    pool[-1] = math.nan
    order = torch.randperm(used * spare, device=DEVICE, dtype=torch.int32)
    tables = []
    for index in range(spare):
        table = torch.full((len(contexts), max(widths) + 1), blocks - 1, dtype=torch.int32, device=DEVICE)
        place = index * used
        for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
            table[row, :width] = order[place : place + width]
            place += width
            if context % size:
                pool[int(table[row, width - 1]), context % size :] = math.nan
        tables.append(table)
    return pool, tables


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def kv_bytes(contexts: Sequence[int], model: Model, dtype: torch.dtype) -> int:
    return sum(contexts) * 2 * model.kv_heads * model.head_dim * dtype.itemsize


# --- checks


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
    bench.check(f"decode {shape}" + (f" {_words(config)}" if config else ""), dtype, work)


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
    bench.check(f"prefill {shape}" + (f" {_words(config)}" if config else ""), dtype, work)


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


def sampling_rows(rows: int, *, filtered: bool) -> SamplingRows:
    """Rows of many kinds; none greedy."""
    which = torch.arange(rows, device=DEVICE)
    heat = torch.tensor([1.0, 0.7, 1.5], device=DEVICE)[which % 3]
    seeds, positions = which * 7919, which + 100
    if not filtered:
        return SamplingRows(heat, seeds, positions)
    top_k = torch.tensor([0, 50, 1000, 1], dtype=torch.int32, device=DEVICE)[which % 4]
    top_p = torch.tensor([0.9, 1.0, 0.5], device=DEVICE)[which % 3]
    return SamplingRows(heat, seeds, positions, top_k, top_p)


def check_all(bench: Bench, quick: bool) -> None:
    check_mixed(bench, Attention, "mixed batch, triton")
    check_mixed(bench, cudnn.Attention, "mixed batch, cudnn")
    for dtype in BOUNDS:
        check_small(bench, dtype)
        check_decode(bench, dtype, QWEN3)
        check_prefill(bench, dtype, QWEN3)
        check_sampling(bench, dtype)
    shapes = [
        Model(heads=8, kv_heads=1, head_dim=64), Model(heads=4, kv_heads=4, head_dim=80, block_size=32),
        Model(heads=14, kv_heads=2, head_dim=96, block_size=64), Model(heads=16, kv_heads=2, head_dim=256),
        Model(heads=16, kv_heads=1, head_dim=128, block_size=128),
    ]  # fmt: skip
    for model in shapes[: 2 if quick else None]:
        check_decode(bench, torch.bfloat16, model)
        check_prefill(bench, torch.bfloat16, model)


# --- timings


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
        return lambda: decode(q, pool, table, lengths, scale, out=out, workspace=workspace, config=config)

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
        return lambda: prefill(q, pool, table, lens, offsets, model.head_dim**-0.5, out=out, config=config)

    return [call(table) for table in tables]


def prefill_flops(slices: Sequence[tuple[int, int]], model: Model) -> float:
    pairs = sum(start * length + length * (length + 1) / 2 for start, length in slices)
    return 4.0 * model.heads * model.head_dim * pairs


PREFILLS: dict[str, list[tuple[int, int]]] = {
    "1x512": [(0, 512)],
    "8x2048": [(0, 2048)] * 8,
    "512 after 4k": [(4096, 512)],
    "1x4096": [(0, 4096)],
}


def time_attention(bench: Bench, decodes: dict[int, DecodeConfig], prefills: PrefillConfig | None) -> None:
    model = QWEN3
    for rows, context in product((1, 8, 32, 128, 256), (512, 1024, 4096)):
        contexts = [context] * rows
        moved = kv_bytes(contexts, model, torch.bfloat16)
        config = decodes.get(rows)
        bench.time("decode", f"{rows} x {context}", lambda c=contexts, f=config: decode_calls(c, f), moved=moved)
    ragged = [int(c) for c in torch.randint(64, 4096, (128,), generator=torch.Generator().manual_seed(1))]
    moved = kv_bytes(ragged, model, torch.bfloat16)
    bench.time("decode", "128 ragged 64-4k", lambda: decode_calls(ragged, decodes.get(128)), moved=moved)
    bench.time("decode head-major pool", "128 x 1024", lambda: decode_calls([1024] * 128, decodes.get(128), hnd=True),
               moved=kv_bytes([1024] * 128, model, torch.bfloat16))  # fmt: skip
    for case, slices in PREFILLS.items():
        bench.time(
            "prefill", case, lambda s=slices: prefill_calls(s, prefills), flops=prefill_flops(slices, model),
            ceiling=CUDNN_TFLOPS,
        )  # fmt: skip
        if all(start == 0 for start, _ in slices):
            bench.time("prefill cudnn", case, lambda s=slices: cudnn_calls(s), flops=prefill_flops(slices, model),
                       ceiling=CUDNN_TFLOPS)  # fmt: skip


def cudnn_calls(slices: Sequence[tuple[int, int]], model: Model = QWEN3) -> list[Callable[[], Tensor]]:
    lengths = [length for _, length in slices]
    pool, tables = pages(lengths, model, torch.bfloat16, sets_for(kv_bytes(lengths, model, torch.bfloat16), 8))
    q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).bfloat16()

    def call(table: Tensor) -> Callable[[], Tensor]:
        attend = cudnn.Attention(PagedBatch([0] * len(lengths), lengths, table.long(), model.block_size))
        return lambda: attend(q, pool, model.head_dim**-0.5)

    return [call(table) for table in tables]


def time_sampling(bench: Bench) -> None:
    for rows in (1, 32, 128, 256):
        moved = rows * QWEN3.vocabulary * 2.0

        def inputs(rows: int = rows) -> list[Tensor]:
            size = (rows, QWEN3.vocabulary)
            return [
                (torch.randn(size, device=DEVICE) * 3).bfloat16() for _ in range(sets_for(rows * QWEN3.vocabulary * 2))
            ]

        def greedy(inputs: Callable[[], list[Tensor]] = inputs) -> list[Callable[[], Any]]:
            return [lambda x=x: sampling.pick(x) for x in inputs()]

        def library(inputs: Callable[[], list[Tensor]] = inputs) -> list[Callable[[], Any]]:
            return [lambda x=x: x.argmax(-1) for x in inputs()]

        def drawn(
            rows: int = rows, inputs: Callable[[], list[Tensor]] = inputs, filtered: bool = False
        ) -> list[Callable[[], Any]]:
            how = sampling_rows(rows, filtered=filtered)
            return [lambda x=x: sampling.pick(x, how) for x in inputs()]

        case = f"{rows} rows"
        bench.time("pick greedy", case, greedy, moved=moved)
        bench.time("torch argmax", case, library, moved=moved)
        bench.time("pick temperature", case, drawn, moved=moved)
        bench.time("pick top-k top-p", case, lambda d=drawn: d(filtered=True), moved=moved)


def time_library(bench: Bench) -> None:
    """cuBLAS on the projections, since all other times only matter beside these."""
    model = QWEN3
    qkv_width = (model.heads + 2 * model.kv_heads) * model.head_dim
    shapes = {
        "qkv": (qkv_width, model.hidden),
        "out": (model.hidden, model.heads * model.head_dim),
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
        "head": (model.vocabulary, model.hidden),
    }
    for rows, (name, (outputs, inputs)) in product((1, 32, 128, 256), shapes.items()):

        def calls(rows: int = rows, outputs: int = outputs, inputs: int = inputs) -> list[Callable[[], Any]]:
            size = outputs * inputs * 2
            weights = [torch.randn(outputs, inputs, device=DEVICE).bfloat16() * 0.02 for _ in range(sets_for(size, 8))]
            x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
            return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]

        bench.time(f"cublas {name}", f"{rows} rows", calls, moved=outputs * inputs * 2.0)


def time_small(bench: Bench) -> None:
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
            return [lambda x=x, r=r: norm.add_rms_norm(x, r, weight, 1e-6) for x, r in pairs]

        def activations(rows: int = rows) -> list[Callable[[], Any]]:
            inputs = [random(rows, 2 * model.intermediate) for _ in range(sets_for(rows * 3 * model.intermediate * 2))]
            return [lambda x=x: activation.silu_mul(x) for x in inputs]

        def places(rows: int = rows) -> list[Callable[[], Any]]:
            angles = torch.rand(5000, model.head_dim // 2, device=DEVICE)
            cos, sin = angles.cos(), angles.sin()
            pool, _ = pages([16 * rows * 4], model, dtype)
            weights = random(model.heads + model.kv_heads, model.head_dim)
            inputs = [random(rows, width) for _ in range(sets_for(rows * width * 2))]
            positions = torch.randint(0, 5000, (rows,), device=DEVICE)
            slots = torch.randperm((len(pool) - 1) * model.block_size, device=DEVICE)[:rows]
            return [
                lambda x=x: qkv.place_qkv(x, positions, slots, cos, sin, pool, model.heads, weights) for x in inputs
            ]

        bench.time("add_rms_norm", case, norms, moved=4.0 * rows * model.hidden * 2)
        bench.time("silu_mul", case, activations, moved=3.0 * rows * model.intermediate * 2)
        bench.time("place_qkv", case, places, moved=2.0 * rows * width * 2)


# --- tuning


def _words(config: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in asdict(config).items())


def tune_decode(bench: Bench, rows: int, context: int, quick: bool) -> DecodeConfig | None:
    """The fastest of a small space: first how a tile is read, then how the line is cut."""
    many = rows >= 16
    start = DecodeConfig(64, 4, 3, 3 if many else 2, 4 if many else 1)
    reads = [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 2)]
    cuts = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (3, 4), (4, 4), (4, 8), (6, 4)]
    candidates = [replace(start, tile=t, warps=w, stages=s) for t, w, s in (reads[3:4] if quick else reads)]
    best = _fastest(bench, f"decode {rows}", candidates, lambda c: decode_calls([context] * rows, c))
    if best is None:
        return None
    candidates = [best, *(replace(best, programs=p, least=least) for p, least in cuts)]
    return _fastest(bench, f"decode {rows}", candidates, lambda c: decode_calls([context] * rows, c))


def tune_prefill(bench: Bench, quick: bool) -> PrefillConfig | None:
    space = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
             (64, 128, 4, 2), (128, 32, 8, 4), (128, 64, 8, 4)]  # fmt: skip
    candidates = [PrefillConfig(*entry) for entry in (space[:1] if quick else space)]
    return _fastest(bench, "prefill", candidates, lambda c: prefill_calls(PREFILLS["8x2048"], c))


def _fastest(bench: Bench, name: str, candidates: Sequence[Any], calls: Callable[[Any], Any]) -> Any:
    best: tuple[float, Any] | None = None
    for config in candidates:
        span = bench.report.attempt(f"tune {name} {_words(config)}", lambda c=config: microseconds(calls(c)))
        if span is None:
            continue
        bench.report.tuned.append({"name": name, **asdict(config), "us": span})
        if best is None or span < best[0]:
            best = (span, config)
    return None if best is None else best[1]


# --- the run


def versions() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "method": " ".join((__doc__ or "").split("Method: ")[1].split()),
    }


def _driver() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def table(report: Report) -> str:
    lines = [f"{'kernel':24s} {'case':18s} {'us':>9s} {'rate':>14s} {'of ceiling':>10s}"]
    for row in report.timings:
        rate = f"{row['gbs']:.0f} GB/s" if "gbs" in row else f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        share = f"{row['share']:.0%}" if "share" in row else ""
        lines.append(f"{row['name']:24s} {row['case']:18s} {row['us']:9.1f} {rate:>14s} {share:>10s}")
    wrong = [check for check in report.checks if not check["good"]]
    lines.append(f"checks: {len(report.checks)} run, {len(wrong)} wrong; failures: {len(report.failures)}")
    lines += [f"  wrong: {c['name']} {c['dtype']} {c['error']:.2e}" for c in wrong]
    lines += [f"  failed: {f['name']}: {f['error']} ({f['at']})" for f in report.failures]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_kernels.json")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and no tuning to speak of")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report, started = Report(), time.perf_counter()
    bench = Bench(report)

    def stage(name: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {name}", flush=True)

    stage("checks")
    check_all(bench, options.quick)
    stage("tuning")
    decodes: dict[int, DecodeConfig] = {}
    for rows, context in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024)):
        if (best := tune_decode(bench, rows, context, options.quick)) is not None:
            decodes[rows] = best
            print(f"  decode {rows}: {_words(best)}", flush=True)
    prefills = tune_prefill(bench, options.quick)
    print(f"  prefill: {prefills}", flush=True)
    stage("timing")
    time_attention(bench, decodes, prefills)
    time_small(bench)
    time_sampling(bench)
    time_library(bench)
    stage("done")
    result = {"versions": versions(), **asdict(report)}
    (options.out / "gpu_kernels.json").write_text(json.dumps(result, indent=1, default=str))
    print(table(report))


if __name__ == "__main__":
    main()
