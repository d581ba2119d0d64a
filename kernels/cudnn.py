"""Attention of first chunks by cuDNN's Hopper kernel, reached through torch; what has history is Triton's.

A chunk that starts its sequence sees nothing but itself, so its keys are gathered from their pages (a twelfth of the
attention's own time at 2048 tokens) and given to the library as dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.batch import DeviceBatch, PagedBatch
from kernels.triton.attention import Attention as Paged

WORTH = 256
"""Tokens from which on a first chunk is the library's: a shorter one costs more launches than it saves."""

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


class Attention:
    """As the reference. Needs lengths on the host; a `DeviceBatch`, which has none, is Triton's as a whole.

    So is every call with a window that hides something: the library would need a mask as large as the scores.
    """

    def __init__(
        self, batch: PagedBatch | DeviceBatch, backends: Sequence[SDPBackend] = BACKENDS, worth: int = WORTH
    ) -> None:
        self._batch = batch
        self._backends = list(backends)
        self._paged: Paged | None = None
        self._chunks: list[_Chunks] = []
        self._others: list[tuple[slice, Paged]] = []
        if isinstance(batch, PagedBatch):
            self._split(batch, worth)

    def _split(self, batch: PagedBatch, worth: int) -> None:
        edges = [0, *accumulate(batch.lengths)]
        for dense, first, last in _runs(batch, worth):
            rows = slice(edges[first], edges[last])
            if dense:
                self._chunks.append(_Chunks(batch, rows, first, last))
            else:
                part = PagedBatch(
                    batch.starts[first:last], batch.lengths[first:last], batch.tables[first:last], batch.block_size
                )
                self._others.append((rows, Paged(part)))

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None = None) -> Tensor:
        """q [T, H, D] -> [T, H * D]."""
        if not self._chunks or self._hides(window):
            return self._whole()(q, pool, scale, window)
        with sdpa_kernel(self._backends, set_priority=True):
            if len(self._chunks) == 1 and not self._others:
                return self._chunks[0](q, pool, scale)
            out = q.new_empty(len(q), q.shape[1] * q.shape[2])
            for chunks in self._chunks:
                out[chunks.rows] = chunks(q[chunks.rows], pool, scale)
        for rows, paged in self._others:
            paged(q[rows], pool, scale, window, out[rows])
        return out

    def _hides(self, window: int | None) -> bool:
        return window is not None and any(window < chunks.length for chunks in self._chunks)

    def _whole(self) -> Paged:
        if self._paged is None:
            self._paged = Paged(self._batch)
        return self._paged


class _Chunks:
    """Neighbouring first chunks of one length."""

    def __init__(self, batch: PagedBatch, rows: slice, first: int, last: int) -> None:
        self.rows = rows
        self.length = batch.lengths[first]
        self._slices = last - first
        self._blocks = batch.tables[first:last, : -(-self.length // batch.block_size)].flatten()

    def __call__(self, q: Tensor, pool: Tensor, scale: float) -> Tensor:
        keys, values = (part.transpose(1, 2) for part in self._gather(pool).unbind(2))  # [slices, K, length, D]
        queries = q.unflatten(0, (self._slices, self.length)).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=keys.shape[1] != queries.shape[1]
        )
        return out.transpose(1, 2).reshape(len(q), -1)

    def _gather(self, pool: Tensor) -> Tensor:
        """[slices, length, 2, K, D]; what lies beyond a chunk in its last page is cut off."""
        pages = pool[self._blocks]
        return pages.view(self._slices, -1, *pool.shape[2:])[:, : self.length]


def _runs(batch: PagedBatch, worth: int) -> Iterator[tuple[bool, int, int]]:
    """(whether the library takes them, first, last + 1) of neighbouring slices that go together."""
    first = 0
    kinds = [
        length if start == 0 and length >= worth else 0
        for start, length in zip(batch.starts, batch.lengths, strict=True)
    ]
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[first]:
            yield kinds[first] > 0, first, index
            first = index
