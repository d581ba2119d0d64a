"""Projections of any number of tokens, with the norm before, the gate or the residual after.

Which of three ways is taken depends on the number of tokens and on what tuning found: `matvec`, one launch for all of
it, for one; `skinny` for some tens and cuBLAS for the rest, with norm and gate as kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels import autotune
from kernels.autotune import Bucket
from kernels.triton import matvec, skinny
from kernels.triton.activation import silu_mul
from kernels.triton.launch import (
    contiguous_rows,
    early,
    multiprocessors,
    power_of_two,
    require,
    shared_memory,
    store,
    upcasts,
)
from kernels.triton.norm import rms_norm

MOST_TOKENS = 128
"""Of the kernels here: above it a projection is bound by arithmetic, which is cuBLAS's."""

MOST_PROGRAMS = 8
MATVEC, SKINNY, CUBLAS = "matvec", "skinny", "cublas"


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a projection is computed: found by timing, right whatever it is."""

    method: str
    outputs: int = 64
    """Output columns of a tile."""
    inputs: int = 128
    """Input columns read at once."""
    warps: int = 4
    stages: int = 4
    programs: int = 2
    """Programs of a multiprocessor; `skinny` only."""

    def __post_init__(self) -> None:
        sizes = (self.outputs, self.inputs, self.warps)
        if self.method not in (MATVEC, SKINNY, CUBLAS) or any(size & (size - 1) or size < 1 for size in sizes):
            raise ValueError(f"method={self.method}, sizes {sizes}: not a known method or not powers of two")
        if not (1 <= self.stages <= 8 and 1 <= self.programs <= MOST_PROGRAMS):
            raise ValueError(f"stages={self.stages}, programs={self.programs}: at most 8 each")


def linear_config(dtype: torch.dtype, tokens: int, inputs: int, room: int) -> LinearConfig:
    """What serves where nothing was tuned, in programs of `room` bytes of shared memory."""
    if dtype == torch.float32 or tokens > 32:
        return LinearConfig(CUBLAS)
    if tokens == 1:
        return LinearConfig(MATVEC, outputs=4, inputs=min(1024, power_of_two(inputs)))
    deep = LinearConfig(SKINNY, stages=6, programs=1)
    return replace(deep, stages=max(1, min(deep.stages, room // _stage_bytes(deep, tokens, dtype))))


def _stage_bytes(config: LinearConfig, tokens: int, dtype: torch.dtype) -> int:
    """Shared memory of one stage of `skinny`: a block of weights and one of tokens."""
    return (config.outputs + max(16, power_of_two(tokens))) * config.inputs * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of one projection at a time; kernels leave `counters` at zero, as they found it."""

    partials: Tensor
    counters: Tensor

    @classmethod
    def create(cls, device: torch.device, floats: int = 1 << 23, counters: int = 1 << 16) -> Scratch:
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )


@dataclass(slots=True)
class Scratches:
    """One scratch a stream, since projections on several streams may run at the same time."""

    made: dict[tuple[torch.device, int], Scratch] = field(default_factory=dict)

    def of(self, device: torch.device) -> Scratch:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if (device, stream) not in self.made:
            if autotune.capturing():
                # Zeroed by one graph only, it would be garbage to every other.
                raise RuntimeError("projection: run once on this stream before a graph is captured on it")
            self.made[device, stream] = Scratch.create(device)
        return self.made[device, stream]


Choose = Callable[["Projection", Tensor], LinearConfig]


@dataclass(frozen=True, slots=True)
class Projection:
    """y = f(norm(x) @ weight.T + bias) + residual, each of norm, f = SiLU(gate) * up, bias and residual if given."""

    scratches: Scratches
    weight: Tensor
    """[outputs, inputs]; gates, then as many ups, if `gated`."""
    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    choose: Choose | None = None
    """What says how it is computed; None looks for what was tuned."""

    def __post_init__(self) -> None:
        contiguous_rows("projection", self.weight)
        require(not self.gated or len(self.weight) % 2 == 0, "projection: gates and ups must be equally many")

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs (half of them if gated)]; a residual is overwritten with the result."""
        return project(self, x, residual, (self.choose or configured)(self, x))


class Linears:
    """Makes projections that share their scratch; `choose` says how each is computed, if not as tuned."""

    def __init__(self, choose: Choose | None = None) -> None:
        self._scratches = Scratches()
        self._choose = choose

    def linear(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return Projection(self._scratches, weight, bias, choose=self._choose)

    def norm_linear(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Projection:
        return Projection(self._scratches, weight, bias, norm, eps, choose=self._choose)

    def norm_gated(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Projection:
        return Projection(self._scratches, weight, bias, norm, eps, gated=True, choose=self._choose)

    def add_linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        return Projection(self._scratches, weight, bias, choose=self._choose)


def by_library(how: Projection, x: Tensor) -> LinearConfig:
    """Always cuBLAS."""
    return LinearConfig(CUBLAS)


@cache
def tuned() -> Linears:
    """The one that all models of a process share: a stream runs one projection at a time."""
    return Linears()


@cache
def library() -> Linears:
    return Linears(by_library)


def project(how: Projection, x: Tensor, residual: Tensor | None, config: LinearConfig) -> Tensor:
    """A projection by a given config."""
    require(x.dim() == 2 and x.shape[1] == how.weight.shape[1], f"projection: x {list(x.shape)} by {_size(how)}")
    require(x.dtype == how.weight.dtype, f"projection: x is {x.dtype}, the weight {how.weight.dtype}")
    if config.method == CUBLAS or len(x) > MOST_TOKENS or not len(x):
        return _by_library(how, x, residual)
    contiguous_rows("projection", x)
    run = _matvec if config.method == MATVEC else _skinny
    return run(how, x, residual, config)


def _by_library(how: Projection, x: Tensor, residual: Tensor | None) -> Tensor:
    if how.norm is not None:
        x = rms_norm(x, how.norm, how.eps)
    if residual is not None and how.bias is None and not how.gated:
        return residual.addmm_(x, how.weight.t())
    out = F.linear(x, how.weight, how.bias)
    if how.gated:
        out = silu_mul(out)
    return out if residual is None else residual.add_(out)


def _matvec(how: Projection, x: Tensor, residual: Tensor | None, config: LinearConfig) -> Tensor:
    inputs, out = x.shape[1], _out(how, x, residual)
    require(len(x) == 1, f"projection: {len(x)} tokens, matvec takes 1")
    matvec.matvec_kernel[(triton.cdiv(out.shape[1], config.outputs),)](
        x, how.weight, _or(how.bias, x), _or(how.norm, x), out, out, out.shape[1], inputs, how.eps,
        how.weight.stride(0), OUTPUTS=config.outputs, INPUTS=config.inputs, EVEN=inputs % config.inputs == 0,
        LANE=16 // x.dtype.itemsize, NORMED=how.norm is not None, GATED=how.gated, ADDED=residual is not None,
        BIASED=how.bias is not None, num_warps=config.warps, num_stages=config.stages, **early(x.device),
    )  # fmt: skip
    return out


def _skinny(how: Projection, x: Tensor, residual: Tensor | None, config: LinearConfig) -> Tensor:
    """Norm, product and gate one after another."""
    if how.norm is not None:
        x = rms_norm(x, how.norm, how.eps)
    if how.gated:
        out = silu_mul(_skinny(replace(how, norm=None, gated=False), x, None, config))
        return out if residual is None else residual.add_(out)
    (tokens, inputs), out = x.shape, _out(how, x, residual)
    scratch = how.scratches.of(x.device)
    width = max(16, power_of_two(tokens))
    programs = config.programs * multiprocessors(x.device)
    needed = 2 * programs * config.outputs * width
    tiles = triton.cdiv(out.shape[1], config.outputs)
    require(scratch.partials.numel() >= needed, f"projection: {_size(how)}: {needed} partial results, too many")
    require(scratch.counters.numel() >= tiles, f"projection: {_size(how)}: {tiles} tiles, too many")
    skinny.skinny_kernel[(programs,)](
        x, how.weight, _or(how.bias, x), out, out, scratch.partials, scratch.counters,
        tokens, out.shape[1], inputs, x.stride(0), how.weight.stride(0), out.stride(0), out.stride(0),
        TOKENS=width, OUTPUTS=config.outputs, INPUTS=config.inputs, EVEN=inputs % config.inputs == 0,
        ADDED=residual is not None, BIASED=how.bias is not None, UPCAST=upcasts(x.dtype), TOGETHER=4,
        num_warps=config.warps, num_stages=config.stages, **early(x.device),
    )  # fmt: skip
    return out


def _out(how: Projection, x: Tensor, residual: Tensor | None) -> Tensor:
    """Where the result goes: over the residual, if there is one."""
    outputs = len(how.weight) // (2 if how.gated else 1)
    if residual is None:
        return x.new_empty(len(x), outputs)
    require(
        residual.shape == (len(x), outputs), f"projection: residual {list(residual.shape)}, not {[len(x), outputs]}"
    )
    return residual


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not used has to be one all the same."""
    return other if tensor is None else tensor


def _size(how: Projection) -> str:
    return "x".join(map(str, how.weight.shape))


# --- tuned configs


def bucket(how: Projection, x: Tensor) -> Bucket:
    """What a config of this projection is found for."""
    kind = "".join(mark for mark, there in (("n", how.norm is not None), ("g", how.gated)) if there) or "p"
    tokens = power_of_two(max(len(x), 1))
    return Bucket("linear", str(x.dtype).removeprefix("torch."), f"{kind}{_size(how)}", tokens)


def configured(how: Projection, x: Tensor) -> LinearConfig:
    """The tuned config of this projection and number of tokens, or the default."""
    return _configured(bucket(how, x), x.dtype, x.shape[1], x.device)


@cache
def _configured(key: Bucket, dtype: torch.dtype, inputs: int, device: torch.device) -> LinearConfig:
    tuned = None if (known := store(device)) is None else known.best(LinearConfig, key, source())
    room = shared_memory(device)
    if tuned is None or not _takes(tuned, key.size, dtype, room):
        return linear_config(dtype, key.size, inputs, room)
    return tuned


def _takes(config: LinearConfig, tokens: int, dtype: torch.dtype, room: int) -> bool:
    """Whether a config can compute so many tokens: it may have been found for fewer, the nearest that were tuned."""
    if config.method == MATVEC:
        return tokens == 1
    return config.method == CUBLAS or config.stages * _stage_bytes(config, tokens, dtype) <= room


def forget() -> None:
    """Look configs up again: call after tuning."""
    _configured.cache_clear()


@cache
def source() -> str:
    return autotune.fingerprint(Path(matvec.__file__)) + autotune.fingerprint(Path(skinny.__file__))
