"""Gated MLPs of which each token goes through some: two grouped products over pairs of token and expert.

Pairs are sorted by expert on the device, and each expert's are cut into tiles of rows; every program finds its tile
from the experts' counts. Grids are as large as any routing could need, so no host ever asks how it turned out, and a
graph may hold it all. Weights are the tall operand, as in `skinny`: most tiles of a decode have a few rows.

It knows no router, no other rank and no layer. Products of shared experts are projections like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import autotune
from kernels.autotune import Bucket
from kernels.reference import held_in_order
from kernels.triton.launch import contiguous_rows, early, power_of_two, require, shared_memory, store, upcasts
from kernels.triton.pairs import arranged, summed

MOST_EXPERTS = 1024
"""Of one rank: every program holds all their counts in registers."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How the products are cut: found by timing, right whatever it is."""

    rows: int
    """Pairs of a tile, all of one expert."""
    outputs: int
    """Output columns of a tile, gates and ups each."""
    inputs: int
    """Input columns read at once."""
    warps: int
    stages: int

    def __post_init__(self) -> None:
        sizes = (self.rows, self.outputs, self.inputs, self.warps)
        if any(size & (size - 1) or size < 1 for size in sizes):
            raise ValueError(f"sizes {sizes}: not powers of two")
        # 16: the least that tensor cores take.
        if min(sizes[:3]) < 16 or max(sizes[:3]) > 256 or self.warps > 16 or not 1 <= self.stages <= 8:
            raise ValueError(f"{self}: out of range")


def experts_config(dtype: torch.dtype, pairs: int, experts: int, room: int) -> ExpertsConfig:
    """What serves where nothing was tuned, in programs of `room` bytes of shared memory."""
    each = pairs // experts
    if dtype == torch.float32:
        config = ExpertsConfig(16 if each <= 16 else 32, 32, 32, 4, 3)
    elif each <= 32:
        config = ExpertsConfig(16 if each <= 8 else 32, 64, 128, 4, 4)
    else:
        config = ExpertsConfig(64, 128, 64, 8, 4)
    return replace(config, stages=max(1, min(config.stages, room // stage_bytes(config, dtype))))


def stage_bytes(config: ExpertsConfig, dtype: torch.dtype) -> int:
    """Shared memory of one stage: a block of gates, one of ups and one of tokens."""
    return (2 * config.outputs + config.rows) * config.inputs * dtype.itemsize


class Experts:
    """As the reference, for tokens of any number; `config` is how, if not as tuned."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, held: Tensor | None = None, config: ExpertsConfig | None = None
    ) -> None:
        experts, _, width = down.shape
        sizes = f"gate_up {list(gate_up.shape)}, down {list(down.shape)}"
        require(gate_up.shape[:2] == (experts, 2 * width), f"experts: {sizes}, not [E, 2 * width, in], [E, out, width]")
        require(gate_up.dtype == down.dtype, f"experts: gate_up is {gate_up.dtype}, down {down.dtype}")
        require(1 <= experts <= MOST_EXPERTS, f"experts: {experts} of them, at most {MOST_EXPERTS}")
        require(gate_up.is_contiguous() and down.is_contiguous(), "experts: weights must be contiguous")
        held = held_in_order(gate_up) if held is None else held
        require(held.dim() == 1 and held.dtype == torch.int32, "experts: held must be int32 [experts of the model]")
        self._gate_up, self._down, self._held, self._config = gate_up, down, held.contiguous(), config

    def __call__(self, x: Tensor, shares: Tensor, picks: Tensor, residual: Tensor) -> Tensor:
        """residual [T, out] + the sum of the picked experts of x [T, in] by share, which overwrites the residual."""
        self._check(x, shares, picks, residual)
        if not picks.numel():
            return residual
        config = self._config or configured(self._down, picks.numel())
        order, offsets = arranged(picks, self._held, len(self._down))
        gated = self._gated(x, order, offsets, picks.shape[1], config)
        parts = self._weighted(gated, shares, order, offsets, config)
        return summed(parts, picks, self._held, residual)

    def _check(self, x: Tensor, shares: Tensor, picks: Tensor, residual: Tensor) -> None:
        outputs, inputs = self._down.shape[1], self._gate_up.shape[2]
        require(x.dim() == 2 and x.shape[1] == inputs, f"experts: x is {list(x.shape)}, not [T, {inputs}]")
        require(residual.shape == (len(x), outputs), f"experts: residual {list(residual.shape)}, {[len(x), outputs]}")
        require(x.dtype == self._down.dtype, f"experts: x is {x.dtype}, the weights {self._down.dtype}")
        require(picks.shape == shares.shape and len(picks) == len(x), "experts: picks and shares must be [T, active]")
        require(picks.dtype == torch.int32 and shares.dtype == torch.float32, "experts: picks int32, shares float32")
        require(picks.is_contiguous() and shares.is_contiguous(), "experts: picks and shares must be contiguous")
        contiguous_rows("experts", x, residual)

    def _gated(self, x: Tensor, order: Tensor, offsets: Tensor, active: int, config: ExpertsConfig) -> Tensor:
        """silu(gate) * up of every sorted pair, [pairs, width]."""
        (experts, _, width), inputs = self._down.shape, x.shape[1]
        out = x.new_empty(len(order), width)
        _gated[(triton.cdiv(width, config.outputs), tiles(len(order), experts, config.rows))](
            x, self._gate_up, order, offsets, out, experts, width, inputs, x.stride(0), ACTIVE=active,
            **_blocks(config, experts, inputs, x),
        )  # fmt: skip
        return out

    def _weighted(self, gated: Tensor, shares: Tensor, order: Tensor, offsets: Tensor, config: ExpertsConfig) -> Tensor:
        """What each expert adds to each token, by share, [pairs, out]; those of other ranks' experts are not written.

        Rounded to the weights' dtype before they are summed: half the traffic of what is the largest tensor here.
        """
        experts, outputs, width = self._down.shape
        out = gated.new_empty(len(order), outputs)
        _weighted[(triton.cdiv(outputs, config.outputs), tiles(len(order), experts, config.rows))](
            gated, self._down, shares, order, offsets, out, experts, outputs, width,
            **_blocks(config, experts, width, gated),
        )  # fmt: skip
        return out


def _blocks(config: ExpertsConfig, experts: int, inputs: int, x: Tensor) -> dict[str, int | bool]:
    return dict(
        EXPERTS=max(16, power_of_two(experts)), ROWS=config.rows, OUTPUTS=config.outputs, INPUTS=config.inputs,
        EVEN=inputs % config.inputs == 0, UPCAST=upcasts(x.dtype), num_warps=config.warps, num_stages=config.stages,
        **early(x.device),
    )  # fmt: skip


def tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles that no routing exceeds: each expert that has pairs ends with one that may not be full."""
    return min(pairs, pairs // rows + experts)


@triton.jit
def _tile(offsets, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first pair, pairs) of a tile; of a tile that there is not, an expert that there is not."""
    ids = tl.arange(0, EXPERTS)
    begins = tl.load(offsets + ids, mask=ids < experts, other=0)
    lengths = tl.load(offsets + ids + 1, mask=ids < experts, other=0) - begins
    counts = (lengths + ROWS - 1) // ROWS
    ends = tl.cumsum(counts, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    here = ids == expert
    skipped = (tile - tl.sum(tl.where(here, ends - counts, 0), 0)) * ROWS
    first = tl.sum(tl.where(here, begins, 0), 0) + skipped
    return expert, first, tl.minimum(tl.sum(tl.where(here, lengths, 0), 0) - skipped, ROWS)


@triton.jit(do_not_specialize=["experts"])
def _gated(
    x, gate_up, order, offsets, out, experts, width, inputs, x_row,
    ACTIVE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [pairs in order, width] = silu(gate) * up of x [T, inputs]."""
    if EARLY:
        gdc_wait()
    expert, first, count = _tile(offsets, tl.program_id(1), experts, EXPERTS, ROWS)
    if expert < experts:
        inside = tl.arange(0, ROWS)
        pair = tl.load(order + first + inside, mask=inside < count, other=0)
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        # Surplus columns read the last weight again: cheaper than a mask on every load.
        row = tl.minimum(column, width - 1).to(tl.int64)
        gate = gate_up + (expert.to(tl.int64) * 2 * width + row)[:, None] * inputs
        up = gate + width.to(tl.int64) * inputs
        values = x + (pair // ACTIVE).to(tl.int64)[:, None] * x_row
        gates = tl.zeros((OUTPUTS, ROWS), tl.float32)
        ups = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(0, inputs, INPUTS):
            k = start + tl.arange(0, INPUTS)
            tokens = tl.trans(_loaded(values, k, inputs, EVEN, UPCAST))
            gates = tl.dot(_loaded(gate, k, inputs, EVEN, UPCAST), tokens, gates, input_precision="tf32x3")
            ups = tl.dot(_loaded(up, k, inputs, EVEN, UPCAST), tokens, ups, input_precision="tf32x3")
        result = gates * tl.sigmoid(gates) * ups
        places = out + (first + inside).to(tl.int64)[None, :] * width + column[:, None]
        real = (column[:, None] < width) & (inside[None, :] < count)
        tl.store(places, result.to(out.dtype.element_ty), mask=real)
    if EARLY:
        # Not sooner: programs of the next kernel would crowd the multiprocessors that are ready first.
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["experts"])
def _weighted(
    gated, down, shares, order, offsets, out, experts, outputs, width,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [pairs as they were, outputs] = gated [pairs in order, width] @ down.T, by share."""
    if EARLY:
        gdc_wait()
    expert, first, count = _tile(offsets, tl.program_id(1), experts, EXPERTS, ROWS)
    if expert < experts:
        inside = tl.arange(0, ROWS)
        real = inside < count
        pair = tl.load(order + first + inside, mask=real, other=0).to(tl.int64)
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.minimum(column, outputs - 1).to(tl.int64)
        weights = down + (expert.to(tl.int64) * outputs + row)[:, None] * width
        # Surplus rows repeat the last one: what is beyond it may not be written.
        values = gated + (first + tl.minimum(inside, count - 1)).to(tl.int64)[:, None] * width
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(0, width, INPUTS):
            k = start + tl.arange(0, INPUTS)
            tokens = tl.trans(_loaded(values, k, width, EVEN, UPCAST))
            sums = tl.dot(_loaded(weights, k, width, EVEN, UPCAST), tokens, sums, input_precision="tf32x3")
        share = tl.load(shares + pair, mask=real, other=0.0)
        places = out + pair[None, :] * outputs + column[:, None]
        stored = (column[:, None] < outputs) & real[None, :]
        tl.store(places, (sums * share[None, :]).to(out.dtype.element_ty), mask=stored)
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def _loaded(rows, k, inputs, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """A block of rows; zeros beyond the last input."""
    # EVEN: a mask would cost, though it hides nothing.
    block = tl.load(rows + k[None, :]) if EVEN else tl.load(rows + k[None, :], mask=k[None, :] < inputs, other=0.0)
    return block.to(tl.float32) if UPCAST else block


# --- tuned configs


def bucket(down: Tensor, pairs: int) -> Bucket:
    """What a config of these experts, by weights down [E, out, width], is found for."""
    sizes = "x".join(map(str, down.shape))
    return Bucket("experts", str(down.dtype).removeprefix("torch."), f"e{sizes}", power_of_two(pairs))


def configured(down: Tensor, pairs: int) -> ExpertsConfig:
    """The tuned config for these experts and so many pairs, or the default."""
    return _configured(bucket(down, pairs), down.dtype, len(down), down.device)


@cache
def _configured(key: Bucket, dtype: torch.dtype, experts: int, device: torch.device) -> ExpertsConfig:
    tuned = None if (known := store(device)) is None else known.best(ExpertsConfig, key, source())
    room = shared_memory(device)
    if tuned is None or tuned.stages * stage_bytes(tuned, dtype) > room:
        return experts_config(dtype, key.size, experts, room)
    return tuned


def forget() -> None:
    """Look configs up again: call after tuning."""
    _configured.cache_clear()


@cache
def source() -> str:
    return autotune.fingerprint(Path(__file__))
