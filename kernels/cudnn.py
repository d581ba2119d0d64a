"""Attention of first chunks by cuDNN's Hopper kernel, reached through torch; what has history is Triton's.

A chunk that starts its sequence sees nothing but itself, so its keys are gathered from their pages (a twelfth of the
attention's own time at 2048 tokens) and given to the library as dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.batch import DeviceBatch, PagedBatch
from kernels.triton.attention import Attention as Paged

WORTH = 256
"""Tokens from which on a first chunk is the library's: a shorter one costs more launches than it saves."""

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


class Attention:
    """As the reference. Needs lengths on the host; a `DeviceBatch`, which has none, is Triton's as a whole."""

    def __init__(
        self, batch: PagedBatch | DeviceBatch, backends: Sequence[SDPBackend] = BACKENDS, worth: int = WORTH
    ) -> None:
        self._backends = list(backends)
        self._chunks: list[_Chunks] = []
        self._others: list[tuple[slice, Paged]] = []
        if isinstance(batch, DeviceBatch):
            self._others.append((slice(None), Paged(batch)))
            return
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
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for rows, paged in self._others:
            paged(q[rows], pool, scale, window, out[rows])
        with sdpa_kernel(self._backends, set_priority=True):
            for chunks in self._chunks:
                out[chunks.rows] = chunks(q[chunks.rows], pool, scale, window)
        return out


class _Chunks:
    """Neighbouring first chunks of one length."""

    def __init__(self, batch: PagedBatch, rows: slice, first: int, last: int) -> None:
        self.rows = rows
        self._slices = last - first
        self._length = batch.lengths[first]
        self._blocks = batch.tables[first:last, : -(-self._length // batch.block_size)].flatten()

    def __call__(self, q: Tensor, pool: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = (part.transpose(1, 2) for part in self._gather(pool).unbind(2))  # [slices, K, length, D]
        queries = q.unflatten(0, (self._slices, self._length)).transpose(1, 2)
        hides = window is not None and window < self._length
        out = F.scaled_dot_product_attention(
            queries, keys, values, self._mask(window, q.device) if hides else None, is_causal=not hides, scale=scale,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2).reshape(len(q), -1)

    def _gather(self, pool: Tensor) -> Tensor:
        """[slices, length, 2, K, D]; what lies beyond a chunk in its last page is cut off."""
        pages = pool[self._blocks]
        return pages.view(self._slices, -1, *pool.shape[2:])[:, : self._length]

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        assert window is not None
        places = torch.arange(self._length, device=device)
        behind = places[:, None] - places
        return (behind >= 0) & (behind < window)


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
