"""Every Triton kernel on a real GPU, in one run: checked against the reference, tuned, timed, written as JSON.

    python3 experiments/benchmarks/gpu_kernels.py --out OUT [--stages checks,tune,steps] [--limit 290]

It imports torch, triton, numpy and our kernels. Stages run in processes of their own, so that a kernel that breaks the
device's context takes its stage with it and no other; a kernel that merely fails is reported with its error's last
line, and its stage goes on. Tuned configs go to OUT/<device>.json, which belongs into kernels/tuned/.

The shape that is timed is Qwen3-8B's; ceilings are those measured on an H200 (copy 4.3 TB/s, bf16 matrix product 790
TFLOP/s, cuDNN causal attention 524 TFLOP/s).

Method: inputs are fresh random numbers, outputs and unused KV are filled with NaN before each check. Timings are
medians of graph replays between CUDA events; one graph holds many launches, which go round several sets of inputs
that together are larger than the second-level cache. Steps are 36 layers with weights and KV of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels import cudnn, reference
from kernels.autotune import Store
from kernels.batch import PagedBatch, SamplingRows
from kernels.triton import activation, launch, norm, qkv, sampling, tuning
from kernels.triton import decode as decoding
from kernels.triton import linear as projecting
from kernels.triton import prefill as prefilling
from kernels.triton.attention import Attention
from kernels.triton.decode import DecodeConfig, Workspace, decode
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig, Linears, Projection, Scratches, project
from kernels.triton.prefill import PrefillConfig, prefill
from kernels.triton.timing import microseconds, sets_for
from kernels.triton.tuning import words

COPY_GBS = 4300.0
MATMUL_TFLOPS = 790.0
CUDNN_TFLOPS = 524.0

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

    @property
    def sizes(self) -> tuning.Sizes:
        parts = asdict(self)
        del parts["layers"]
        return tuning.Sizes(**parts)

    @property
    def weights(self) -> int:
        """Elements that a step reads: of all projections and the head."""
        parts = [outputs * inputs for outputs, inputs, *_ in self.sizes.projections.values()]
        return sum(parts[:-1]) * self.layers + parts[-1]


QWEN3 = Model()


@dataclass
class Report:
    """What a stage found, in the order found."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    tuned: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    path: Path | None = None
    """Written after everything attempted, since a stage may be cut short."""

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out `work`; a failure is a line of the report, not the end of the stage."""
        try:
            return self._carry_out(name, work)
        finally:
            if self.path is not None:
                self.path.write_text(json.dumps(self.found()))

    def found(self) -> dict[str, list[Any]]:
        """Everything but where it is written."""
        return {name: getattr(self, name) for name in ("checks", "timings", "tuned", "failures")}

    def _carry_out(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever a kernel or its compiler raises, the others go on
            lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            place = traceback.extract_tb(error.__traceback__)[-1]
            last = f"{type(error).__name__}: {lines[-1].strip()[:200]}"
            self.failures.append({"name": name, "error": last, "at": f"{Path(place.filename).name}:{place.lineno}"})
            print(f"FAILED {name}: {last}", flush=True)
            return None

    def absorb(self, other: Mapping[str, Any]) -> None:
        """Add what another stage has found."""
        for name, found in self.found().items():
            found.extend(other.get(name, []))


# --- measuring


def error(out: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error in double precision; NaN anywhere is NaN."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


class Bench:
    """Checks and timings that go to one report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def check(
        self,
        name: str,
        dtype: torch.dtype,
        work: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        bound: float | None = None,
    ) -> None:
        """`work` yields (output, float32 reference)."""
        most = BOUNDS[dtype] if bound is None else bound

        def run() -> None:
            worst = max((error(out, wanted) for out, wanted in work()), key=lambda e: math.inf if math.isnan(e) else e)
            good = worst < most
            self.report.checks.append({"name": name, "dtype": _short(dtype), "error": worst, "good": good})
            if not good:
                print(f"WRONG {name} {_short(dtype)}: error {worst:.2e}, bound {most:.0e}", flush=True)

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
        torch.cuda.empty_cache()


class Rehearsal(Bench):
    """Compiles what checks will launch and checks nothing."""

    def check(self, name: str, dtype: torch.dtype, work: Any, bound: float | None = None) -> None:
        # What was not launched computes nothing: a check's own assertions may well fail.
        with suppress(Exception):
            for _ in work():
                pass


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


def check_linear(bench: Bench, dtype: torch.dtype) -> None:
    """Every way that takes the number of tokens, with everything around it."""
    ways = {
        MATVEC: ([1, 2, 3], LinearConfig(MATVEC, 8, 512)),
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


# --- tuning


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
    return found or projecting.linear_config(x.dtype, len(x), x.shape[1])


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


def prefill_flops(slices: Sequence[tuple[int, int]], model: Model) -> float:
    pairs = sum(start * length + length * (length + 1) / 2 for start, length in slices)
    return 4.0 * model.heads * model.head_dim * pairs


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
            ceiling=CUDNN_TFLOPS,
        )  # fmt: skip
        if all(start == 0 for start, _ in slices):
            bench.time("prefill cudnn", case, partial(cudnn_calls, slices), flops=prefill_flops(slices, model),
                       ceiling=CUDNN_TFLOPS)  # fmt: skip


def cudnn_calls(slices: Sequence[tuple[int, int]], model: Model = QWEN3) -> list[Callable[[], Tensor]]:
    lengths = [length for _, length in slices]
    pool, tables = pages(lengths, model, torch.bfloat16, sets_for(kv_bytes(lengths, model, torch.bfloat16), 8))
    q = torch.randn(sum(lengths), model.heads, model.head_dim, device=DEVICE).bfloat16()

    def call(table: Tensor) -> Callable[[], Tensor]:
        attend = cudnn.Attention(PagedBatch([0] * len(lengths), lengths, table.long(), model.block_size))
        return partial(attend, q, pool, model.head_dim**-0.5)

    return [call(table) for table in tables]


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


# --- whole steps


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
    """Decode steps in a graph, with projections of cuBLAS and as tuned; a prefill step launched one by one."""
    model = QWEN3
    tuned = Linears(partial(linear_tuned, store))
    kinds = {"tuned": tuned, "cublas": Linears(projecting.by_library), "early": tuned}
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
            launch.EARLY = name == "early"
            bench.time(f"step {name}", f"{rows} x {context}", calls, moved=moved)
            launch.EARLY = False
        # Two computations of 36 layers in bf16 differ by more than one kernel may; the same one does not at all.
        for name, other, bound in (("tuned", "cublas", 5e-2), ("early", "tuned", 1e-9)):
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
         "ceiling": MATMUL_TFLOPS, "share": rate / MATMUL_TFLOPS}
    )  # fmt: skip


# --- the run

STAGES: Mapping[str, Callable[[Bench, Store], None]] = {
    "checks": checks, "tune": tune, "steps": steps, "attention": attention, "linear": linear, "small": small,
    "sample": sample,
}  # fmt: skip


def versions() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
        "driver": subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "method": " ".join((__doc__ or "").split("Method: ")[1].split()),
    }


def table_of(report: Report) -> str:
    lines = [f"{'kernel':20s} {'case':16s} {'us':>9s} {'rate':>13s} {'share':>6s}"]
    for row in report.timings:
        rate = f"{row['gbs']:.0f} GB/s" if "gbs" in row else f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        share = f"{row['share']:.0%}" if "share" in row else ""
        lines.append(f"{row['name']:20s} {row['case']:16s} {row['us']:9.1f} {rate:>13s} {share:>6s}")
    wrong = [check for check in report.checks if not check["good"]]
    lines.append(f"checks: {len(report.checks)} run, {len(wrong)} wrong; failures: {len(report.failures)}")
    lines += [f"  wrong: {c['name']} {c['dtype']} {c['error']:.2e}" for c in wrong[:20]]
    lines += [f"  failed: {f['name'][:60]}: {f['error'][:120]} ({f['at']})" for f in report.failures[:20]]
    return "\n".join(lines)


def run_stage(name: str, out: Path) -> None:
    """In a process of its own: what it finds is written even if it is cut short."""
    report = Report(path=out / f"stage-{name}.json")
    store = Store(torch.cuda.get_device_properties(0).name, folder=out)
    report.attempt(f"stage {name}", partial(STAGES[name], Bench(report), store))


def run_all(stages: Sequence[str], out: Path, limit: float) -> Report:
    report, started = Report(), time.perf_counter()
    for name in stages:
        spent = time.perf_counter() - started
        if spent > limit - 15:
            report.failures.append({"name": name, "error": "no time left", "at": "run_all"})
            continue
        print(f"[{spent:5.0f} s] {name}", flush=True)
        command = [sys.executable, __file__, "--out", str(out), "--stage", name]
        found = out / f"stage-{name}.json"
        found.unlink(missing_ok=True)
        try:
            code = subprocess.run(command, check=False, timeout=limit - spent).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if found.is_file():
            report.absorb(json.loads(found.read_text()))
        if code:
            why = "cut short by the limit" if code == -1 else f"ended with code {code}"
            report.failures.append({"name": f"stage {name}", "error": why, "at": "run_all"})
        result = {"versions": versions(), **report.found()}
        (out / "gpu_kernels.json").write_text(json.dumps(result, indent=1, default=str))
    print(f"[{time.perf_counter() - started:5.0f} s] done")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_kernels.json and tuned configs")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--limit", type=float, default=290.0, help="seconds after which no stage goes on")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.stages.split(",") if name not in STAGES]:
        parser.error(f"--stages: no {unknown[0]}; there are {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage:
        run_stage(options.stage, options.out)
        return
    print(table_of(run_all(options.stages.split(","), options.out, options.limit)))


if __name__ == "__main__":
    main()
