"""What is tried when a kernel is tuned, on inputs like those it will get, and kept in a store.

python -m kernels tune --heads 32 --kv-heads 8 --head-dim 128 --hidden 4096 --intermediate 12288
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.autotune import Store, tune
from kernels.triton import decode as decoding
from kernels.triton import experts as mixing
from kernels.triton import linear as projecting
from kernels.triton import prefill as prefilling
from kernels.triton.decode import DecodeConfig, Workspace
from kernels.triton.experts import ExpertsConfig
from kernels.triton.launch import shared_memory
from kernels.triton.linear import CUBLAS, MATVEC, SKINNY, LinearConfig, Projection, Scratches, project
from kernels.triton.prefill import PrefillConfig
from kernels.triton.routing import route
from kernels.triton.timing import microseconds, sets_for

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Of the experts in place of an MLP: how many, how many a token goes through, how wide each is."""

    count: int
    active: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ValueError(f"tune: active={self.active} must lie in 1..{self.count}, the experts that there are")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model that kernels are tuned for; `context` tokens a row, as serving would have."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    context: int = 1024
    experts: Mixture | None = None

    @property
    def projections(self) -> dict[str, tuple[int, int, bool, bool]]:
        """(outputs, inputs, normed, gated) of a layer's projections and the head."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden, True, False),
            "out": (self.hidden, width, False, False),
            "gate_up": (2 * self.intermediate, self.hidden, True, True),
            "down": (self.hidden, self.intermediate, False, False),
            "head": (self.vocabulary, self.hidden, False, False),
        }


DEVICE = "cuda"

ROWS = (1, 8, 32, 64, 128, 256)
"""Of decode batches that are tuned; the nearest serves the others."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of projections that are tuned: as far as anything but cuBLAS may win."""


MIXED_TOKENS = (*TOKENS, 256, 512, 2048, 8192)
"""Of experts: nothing else computes those."""


def tune_all(store: Store, sizes: Sizes, report: Report) -> None:
    """Everything that has a config."""
    for rows in ROWS:
        tune_decode(store, sizes, rows, report)
    tune_prefill(store, sizes, report)
    for tokens, name in product(TOKENS, sizes.projections):
        tune_projection(store, sizes, name, tokens, report)
    if sizes.experts is not None:
        for tokens in MIXED_TOKENS:
            tune_experts(store, sizes, sizes.experts, tokens, report)


# --- decode


def tune_decode(store: Store, sizes: Sizes, rows: int, report: Report) -> DecodeConfig | None:
    """First how a tile is read, then how the line of tiles is cut."""
    key = decoding.bucket(sizes.dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, rows)
    start = decoding.decode_config(sizes.dtype, sizes.head_dim, rows)
    calls = _decode_calls(sizes, [sizes.context] * rows)
    best = _best(store, key, list(decode_reads(start)), calls, decoding.source(), report)
    if best is None:
        return None
    return _best(store, key, [best, *decode_cuts(best)], calls, decoding.source(), report)


def decode_reads(start: DecodeConfig) -> Iterator[DecodeConfig]:
    """Tiles, warps and depth; which is best depends on how many programs share a multiprocessor."""
    reads = [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 2)]
    for (tile, warps, stages), programs in product(reads, (2, 4)):
        yield replace(start, tile=tile, warps=warps, stages=stages, programs=programs)


def decode_cuts(start: DecodeConfig) -> Iterator[DecodeConfig]:
    """Programs a multiprocessor and the least share."""
    for programs, least in [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (2, 4), (3, 4), (4, 4), (4, 8), (6, 4)]:
        yield replace(start, programs=programs, least=least)


def _decode_calls(sizes: Sizes, contexts: Sequence[int]) -> Callable[[DecodeConfig], list[Callable[[], Any]]]:
    pool, tables = _pages(sizes, contexts)
    rows, width = len(contexts), sizes.heads * sizes.head_dim
    q = _random(rows, sizes.heads, sizes.head_dim, dtype=sizes.dtype)
    out = q.new_empty(rows, width)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=q.device)
    workspace = Workspace.create(q.device, rows, sizes.heads, sizes.kv_heads, sizes.head_dim)

    def calls(config: DecodeConfig) -> list[Callable[[], Any]]:
        def call(table: Tensor) -> Callable[[], Any]:
            return lambda: decoding.decode(
                q, pool, table, lengths, sizes.head_dim**-0.5, out=out, workspace=workspace, config=config
            )

        return [call(table) for table in tables]

    return calls


# --- prefill


def tune_prefill(store: Store, sizes: Sizes, report: Report) -> PrefillConfig | None:
    """On some first chunks of 2048 tokens."""
    key = prefilling.bucket(sizes.dtype, sizes.heads, sizes.kv_heads, sizes.head_dim)
    space = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
             (64, 128, 4, 2), (128, 32, 8, 4), (128, 64, 8, 4)]  # fmt: skip
    start = prefilling.prefill_config(sizes.dtype, sizes.head_dim, shared_memory(torch.device(DEVICE)))
    candidates = [start, *(PrefillConfig(*part) for part in space)]
    return _best(store, key, candidates, _prefill_calls(sizes, [2048] * 4), prefilling.source(), report)


def _prefill_calls(sizes: Sizes, lengths: Sequence[int]) -> Callable[[PrefillConfig], list[Callable[[], Any]]]:
    pool, tables = _pages(sizes, lengths)
    q = _random(sum(lengths), sizes.heads, sizes.head_dim, dtype=sizes.dtype)
    out = q.new_empty(len(q), sizes.heads * sizes.head_dim)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    offsets = torch.tensor([0, *lengths], device=q.device).cumsum(0).int()

    def calls(config: PrefillConfig) -> list[Callable[[], Any]]:
        def call(table: Tensor) -> Callable[[], Any]:
            return lambda: prefilling.prefill(
                q, pool, table, contexts, offsets, sizes.head_dim**-0.5, out=out, config=config
            )

        return [call(table) for table in tables]

    return calls


# --- projections


def tune_projection(store: Store, sizes: Sizes, name: str, tokens: int, report: Report) -> LinearConfig | None:
    """One of `sizes.projections` for some tokens: which way, and how."""
    outputs, inputs, normed, gated = sizes.projections[name]
    weights = [
        _random(outputs, inputs, dtype=sizes.dtype) * 0.02
        for _ in range(sets_for(outputs * inputs * sizes.dtype.itemsize, 8))
    ]
    norm = _random(inputs, dtype=sizes.dtype) if normed else None
    scratches, x = Scratches(), _random(tokens, inputs, dtype=sizes.dtype)
    ways = [Projection(scratches, weight, None, norm, 1e-6, gated) for weight in weights]

    def calls(config: LinearConfig) -> list[Callable[[], Any]]:
        return [partial(project, how, x, None, config) for how in ways]

    key = projecting.bucket(ways[0], x)
    candidates = list(linear_space(tokens, sizes.dtype))
    return _best(store, key, candidates, calls, projecting.source(), report)


def linear_space(tokens: int, dtype: torch.dtype) -> Iterator[LinearConfig]:
    """cuBLAS, and what may beat it."""
    yield LinearConfig(CUBLAS)
    if dtype == torch.float32:
        return
    if tokens == 1:
        sizes = [(4, 1024, 4), (8, 1024, 4), (8, 512, 4), (4, 512, 2), (4, 2048, 8), (2, 1024, 2)]
        for outputs, inputs, warps in sizes:
            yield LinearConfig(MATVEC, outputs, inputs, warps)
        return
    for outputs, inputs, warps, stages, programs in [
        (64, 128, 4, 6, 1), (64, 128, 4, 5, 1), (64, 128, 8, 6, 1), (64, 256, 4, 3, 1), (64, 256, 4, 4, 1),
        (64, 128, 4, 4, 2), (64, 64, 4, 6, 2), (64, 128, 4, 3, 3), (64, 64, 4, 6, 3), (128, 64, 8, 6, 1),
    ]:  # fmt: skip
        yield LinearConfig(SKINNY, outputs, inputs, warps, stages, programs)


# --- experts


def tune_experts(store: Store, sizes: Sizes, mixture: Mixture, tokens: int, report: Report) -> ExpertsConfig | None:
    """All of a layer's routed experts for some tokens, picked by chance."""
    weights = 3 * mixture.count * mixture.width * sizes.hidden * sizes.dtype.itemsize
    sets = [_experts(sizes, mixture) for _ in range(sets_for(weights, 4))]
    x = _random(tokens, sizes.hidden, dtype=sizes.dtype)
    residual = torch.zeros_like(x)
    shares, picks = route(_random(tokens, mixture.count, dtype=torch.float32), mixture.active, True)

    def calls(config: ExpertsConfig) -> list[Callable[[], Any]]:
        mixes = [mixing.Experts(gate_up, down, None, config) for gate_up, down in sets]
        return [partial(mix, x, shares, picks, residual) for mix in mixes]

    pairs, down = picks.numel(), sets[0][1]
    room = shared_memory(down.device)
    start = mixing.experts_config(sizes.dtype, pairs, mixture.count, room)
    candidates = list(dict.fromkeys((start, *experts_space(pairs // mixture.count, sizes.dtype))))
    fitting = [config for config in candidates if config.stages * mixing.stage_bytes(config, sizes.dtype) <= room]
    return _best(store, mixing.bucket(down, pairs), fitting, calls, mixing.source(), report)


def experts_space(each: int, dtype: torch.dtype) -> Iterator[ExpertsConfig]:
    """For so many pairs an expert: few rows want deep loads of weights, many want large products."""
    if dtype == torch.float32:
        sizes = [(16, 32, 32, 4, 3), (16, 64, 32, 4, 3), (32, 64, 32, 4, 2), (64, 64, 32, 8, 2)]
    elif each <= 32:
        sizes = [(16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 64, 64, 4, 6), (16, 64, 64, 4, 4), (16, 128, 64, 8, 4),
                 (32, 64, 128, 4, 4), (32, 64, 64, 4, 6)]  # fmt: skip
    else:
        sizes = [(64, 128, 64, 8, 4), (64, 128, 64, 8, 3), (64, 64, 64, 4, 4), (128, 64, 64, 8, 4),
                 (128, 128, 64, 8, 3), (32, 128, 64, 8, 4), (32, 64, 128, 4, 3)]  # fmt: skip
    for size in sizes:
        yield ExpertsConfig(*size)


def _experts(sizes: Sizes, mixture: Mixture) -> tuple[Tensor, Tensor]:
    gate_up = torch.empty(mixture.count, 2 * mixture.width, sizes.hidden, dtype=sizes.dtype, device=DEVICE)
    down = torch.empty(mixture.count, sizes.hidden, mixture.width, dtype=sizes.dtype, device=DEVICE)
    return gate_up.normal_(std=0.02), down.normal_(std=0.02)


# --- common


def _best(
    store: Store, key: Any, candidates: Sequence[Any], calls: Callable[[Any], list[Callable[[], Any]]],
    source: str, report: Report,
) -> Any:  # fmt: skip
    def measure(config: Any) -> float:
        span = microseconds(calls(config))
        report(f"  {key} {words(config)}: {span:.1f} us")
        return span

    def failed(config: Any, error: Exception) -> None:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        report(f"  {key} {words(config)}: failed, {type(error).__name__}: {lines[-1].strip()[:160]}")

    compile_ahead([calls(config)[0] for config in candidates])
    return tune(store, key, candidates, measure, source, failed)


def compile_ahead(calls: Sequence[Callable[[], Any]]) -> None:
    """Compile what the calls would launch, side by side: one after another it is most of the time of tuning.

    Nothing runs. What does not compile is found out again when it is timed.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool, mode(pool, ignore_errors=True), _launching_nothing():
        for call in calls:
            with suppress(Exception):
                call()


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Triton's own way to compile only, for calls that know nothing of it."""
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, warmup=True, **options)

    JITFunction.run = warm_up
    try:
        yield
    finally:
        JITFunction.run = run


def words(config: Any) -> str:
    """A config as one would say it."""
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())


def _random(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, dtype=torch.float32, device=DEVICE).to(dtype)


def _pages(sizes: Sizes, contexts: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """A pool of random KV, and block tables of disjoint blocks so that no call finds another's in the cache."""
    widths = [-(-context // sizes.block_size) for context in contexts]
    used, width = sum(widths), max(widths)
    block = sizes.block_size * 2 * sizes.kv_heads * sizes.head_dim
    spare = sets_for(used * block * sizes.dtype.itemsize, 32)
    pool = torch.empty(
        used * spare, sizes.block_size, 2, sizes.kv_heads, sizes.head_dim, dtype=sizes.dtype, device=DEVICE
    ).normal_()
    order = torch.randperm(used * spare, device=DEVICE, dtype=torch.int32).view(spare, used)
    tables = []
    for blocks in order:
        table = torch.zeros(len(contexts), width, dtype=torch.int32, device=DEVICE)
        for row, part in enumerate(blocks.split(widths)):
            table[row, : len(part)] = part
        tables.append(table)
    return pool, tables
