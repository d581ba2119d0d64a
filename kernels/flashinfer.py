"""Attention by FlashInfer, which plans a batch on the host and runs the plan for every layer.

What the host does not know of a batch, as in a captured graph, is Triton's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import flashinfer
import torch
from torch import Tensor
from torch.cuda import Event

from kernels.batch import DeviceBatch, PagedBatch, Span
from kernels.triton.attention import Attention as Paged
from kernels.triton.attention import on_device

WORKSPACE = 128 << 20
"""Bytes for partial results, as FlashInfer recommends."""

PLANNERS = 4
"""So that the host may plan some steps ahead of the device: a planner is used again when its last plan is there."""


class Planners:
    """What the attention of one model's steps shares: they run one after another, on one stream."""

    def __init__(self) -> None:
        self._planners: deque[_Planner] = deque()

    def attention(self, batch: PagedBatch | DeviceBatch) -> Attention:
        return Attention(batch, self)

    def next(self, device: torch.device) -> _Planner:
        """The one that was used longest ago."""
        if not self._planners:
            # Zeros: FlashInfer counts in it.
            workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
            self._planners.extend(_Planner(workspace) for _ in range(PLANNERS))
        self._planners.rotate(-1)
        return self._planners[-1]


class Attention:
    """As the reference."""

    def __init__(self, batch: PagedBatch | DeviceBatch, planners: Planners) -> None:
        self._batch = batch if isinstance(batch, DeviceBatch) else on_device(batch)
        self._planners = planners
        self._paged = Paged(self._batch)
        self._planned: dict[tuple[float, int | None], _Planner] = {}

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [T, H, D] -> [T, H * D]. Rows that belong to no slice are not written."""
        if not self._batch.spans:
            return self._paged(q, pool, scale, window)
        if (scale, window) not in self._planned:
            planner = self._planners.next(q.device)
            planner.plan(self._batch, q, pool, scale, window)
            self._planned[scale, window] = planner
        return self._planned[scale, window].run(q, pool)


class _Planner:
    """A plan for decode rows and one for prefills."""

    def __init__(self, workspace: Tensor) -> None:
        # Tensor cores take the query heads of one KV head together, whatever their number; FlashAttention 3 does not.
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._uploaded = Event()
        self._decodes = self._padding = self._prefills = slice(0, 0)

    def plan(self, batch: DeviceBatch, q: Tensor, pool: Tensor, scale: float, window: int | None) -> None:
        # A plan is uploaded from a buffer of the wrapper's own, which the device may not have read yet.
        self._uploaded.synchronize()
        real = [span for span in batch.spans[: batch.decodes] if span[1]]
        lengths = [length for _, length in batch.prefills]
        self._decodes, self._padding = slice(0, len(real)), slice(len(real), batch.decodes)
        self._prefills = slice(batch.decodes, batch.decodes + sum(lengths))
        heads = (q.shape[1], pool.shape[3], q.shape[2], pool.shape[1])
        options = dict(
            window_left=-1 if window is None else window - 1, sm_scale=scale, q_data_type=q.dtype,
            kv_data_type=pool.dtype,
        )  # fmt: skip
        if real:
            self._decode.plan(*_pages(batch, 0, real, pool.shape[1]), *heads, **options)
        if lengths:
            queries = _ends(lengths)
            pages = _pages(batch, batch.decodes, batch.prefills, pool.shape[1])
            self._prefill.plan(queries, *pages, *heads, causal=True, **options)
        self._uploaded.record()

    def run(self, q: Tensor, pool: Tensor) -> Tensor:
        out, caches = torch.empty_like(q, memory_format=torch.contiguous_format), pool.unbind(2)
        for wrapper, rows in ((self._decode, self._decodes), (self._prefill, self._prefills)):
            if rows.start < rows.stop:
                wrapper.run(q[rows], caches, out=out[rows])
        out[self._padding] = 0
        return out.flatten(1)


class _Pages(NamedTuple):
    """Slices' pages one after another: where each slice's begin, their blocks, tokens in each slice's last one.

    Only the blocks are on the device.
    """

    ends: Tensor
    blocks: Tensor
    last: Tensor


def _pages(batch: DeviceBatch, first: int, spans: Sequence[Span], block_size: int) -> _Pages:
    """Of the batch's slices from `first` on. Blocks are found on the device: a list of them would have to be sent."""
    contexts = [start + length for start, length in spans]
    ends = _ends([-(-context // block_size) for context in contexts])
    last = torch.tensor([(context - 1) % block_size + 1 for context in contexts], dtype=torch.int32)
    here = slice(first, first + len(spans))
    counts = (batch.contexts[here] + block_size - 1) // block_size
    total = int(ends[-1])
    rows = torch.repeat_interleave(counts, output_size=total)
    columns = torch.arange(total, device=rows.device) - (counts.cumsum(0) - counts)[rows]
    return _Pages(ends, batch.tables[here][rows, columns], last)


def _ends(counts: Sequence[int]) -> Tensor:
    """Where each of things laid one after another begins, and the end of the last; on the host."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
