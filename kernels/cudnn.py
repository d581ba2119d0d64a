"""Attention of first chunks by cuDNN's Hopper kernel, reached through torch; everything else is Triton's.

A chunk that starts its sequence sees nothing but itself, so its keys are gathered from their pages (a twelfth of the
attention's own time at 2048 tokens) and given to the library as dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.batch import DeviceBatch, PagedBatch, Span
from kernels.triton.attention import Attention as Paged
from kernels.triton.attention import on_device

WORTH = 256
"""Tokens from which on a first chunk is the library's: a shorter one costs more launches than it saves."""

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
"""In this order: where cuDNN refuses a shape, torch's own kernel takes the chunk."""


class Attention:
    """As the reference. First chunks of `worth` tokens are the library's, if the host knows where they are.

    Decodes, chunks with history and what lies in a captured graph are Triton's, and so is every call with a window
    that hides something: the library would need a mask as large as the scores.
    """

    def __init__(
        self, batch: PagedBatch | DeviceBatch, backends: Sequence[SDPBackend] = BACKENDS, worth: int = WORTH
    ) -> None:
        self._batch = batch if isinstance(batch, DeviceBatch) else on_device(batch)
        self._backends = list(backends)
        self._whole = Paged(self._batch)
        self._chunks: list[_Chunks] = []
        self._others: list[Paged] = []
        runs = list(_runs(self._batch.prefills, worth))
        if any(run.dense for run in runs):
            self._split(runs)

    def _split(self, runs: Sequence[_Run]) -> None:
        batch, spans = self._batch, self._batch.prefills
        edges = list(accumulate((length for _, length in spans), initial=batch.decodes))
        if batch.decodes:
            self._others.append(Paged(batch.rows()))
        for run in runs:
            if run.dense:
                tables = batch.tables[batch.decodes + run.first : batch.decodes + run.last]
                self._chunks.append(_Chunks(slice(edges[run.first], edges[run.last]), spans[run.first][1], tables))
            else:
                self._others.append(Paged(batch.part(run.first, run.last)))

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [T, H, D] -> [T, H * D]. Rows that belong to no slice are not written."""
        if not self._chunks or self._hides(window):
            return self._whole(q, pool, scale, window)
        with sdpa_kernel(self._backends, set_priority=True):
            if self._chunks[0].rows == slice(0, len(q)):
                return self._chunks[0](q, pool, scale).reshape(len(q), -1)
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
            for chunks in self._chunks:
                result = chunks(q[chunks.rows], pool, scale)
                out[chunks.rows].view_as(result).copy_(result)
        for others in self._others:
            others(q, pool, scale, window, out)
        return out

    def _hides(self, window: int | None) -> bool:
        return window is not None and any(window < chunks.length for chunks in self._chunks)


class _Chunks:
    """Neighbouring first chunks of one length."""

    def __init__(self, rows: slice, length: int, tables: Tensor) -> None:
        self.rows = rows
        self.length = length
        self._padded = padded(length)
        self._tables = tables
        self._blocks: Tensor | None = None
        """The same for all layers."""

    def __call__(self, q: Tensor, pool: Tensor, scale: float) -> Tensor:
        """q [slices * length, H, D] -> [slices, length, H * D]."""
        keys, values = (part.transpose(1, 2) for part in self._gather(pool).unbind(2))  # [slices, K, padded, D]
        queries = self._laid_out(q).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
        )
        return out.transpose(1, 2)[:, : self.length].flatten(2)

    def _laid_out(self, q: Tensor) -> Tensor:
        """[slices, padded, H, D]; what padding queries see concerns nobody."""
        queries = q.unflatten(0, (-1, self.length))
        if self._padded == self.length:
            return queries
        wide = q.new_empty(len(queries), self._padded, *q.shape[1:])
        wide[:, : self.length] = queries
        return wide

    def _gather(self, pool: Tensor) -> Tensor:
        """[slices, padded, 2, K, D]; padding keys come last, where no query of the chunk sees them."""
        if self._blocks is None:
            self._blocks = self._pages(pool.shape[1])
        kv = pool[self._blocks].flatten(1, 2)[:, : self._padded]
        # No weight does not hide what a freed block held if that is infinite or NaN: 0 * inf is NaN.
        kv[:, self.length :] = 0
        return kv

    def _pages(self, block_size: int) -> Tensor:
        """[slices, pages of the padded chunk]: beyond the chunk its last page again, since tables end there."""
        real, wanted = (-(-length // block_size) for length in (self.length, self._padded))
        columns = torch.arange(wanted, device=self._tables.device).clamp(max=real - 1)
        return self._tables.index_select(1, columns).long()


class _Run(NamedTuple):
    """Neighbouring slices that go together: `dense`: to the library."""

    dense: bool
    first: int
    last: int


def _runs(spans: Sequence[Span], worth: int) -> Iterator[_Run]:
    """Chunks of one length go to the library by powers of two: it plans anew for each number, see `padded`."""
    first = 0
    for length, group in groupby(length if start == 0 and length >= worth else 0 for start, length in spans):
        count = len(list(group))
        for size in _powers(count) if length else (count,):
            yield _Run(length > 0, first, first + size)
            first += size


def _powers(count: int) -> Iterator[int]:
    """Powers of two that add up to it, the largest first."""
    while count:
        yield (power := 1 << (count.bit_length() - 1))
        count -= power


def padded(length: int) -> int:
    """The length that the library is told, at most an eighth more: eight between powers of two, multiples of 32.

    It builds a plan for each shape that it has not seen, which takes longer than hundreds of layers.
    """
    step = max(1 << max(length.bit_length() - 4, 0), 32)
    return length + -length % step
