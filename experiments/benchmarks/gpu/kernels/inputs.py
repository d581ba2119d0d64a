"""The sizes that are timed, and paged inputs of random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels.batch import SamplingRows
from kernels.triton import tuning

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


def prefill_flops(slices: Sequence[tuple[int, int]], model: Model) -> float:
    pairs = sum(start * length + length * (length + 1) / 2 for start, length in slices)
    return 4.0 * model.heads * model.head_dim * pairs
