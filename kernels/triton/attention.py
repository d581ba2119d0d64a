"""Attention of mixed batches: leading slices of one token are decoded, the others prefilled, in one launch each.

Two launches and not one kernel for both: prefill wants large tiles and most of a multiprocessor's memory, decode wants
several small programs on each; one kernel would give every program the larger need of the two.
"""

from __future__ import annotations

from itertools import accumulate, takewhile

import torch
from torch import Tensor

from kernels.batch import DeviceBatch, PagedBatch
from kernels.triton.decode import Workspace, decode
from kernels.triton.prefill import prefill


class Attention:
    """As the reference; a `DeviceBatch` needs no host, a `PagedBatch` is moved to the device first."""

    def __init__(self, batch: PagedBatch | DeviceBatch) -> None:
        self._batch = batch if isinstance(batch, DeviceBatch) else on_device(batch)
        self._workspace: Workspace | None = self._batch.workspace

    def __call__(
        self, q: Tensor, pool: Tensor, scale: float, window: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """q [T, H, D] -> [T, H * D]. Rows that belong to no slice are not written."""
        batch, rows = self._batch, self._batch.decodes
        out = q.new_empty(len(q), q.shape[1] * q.shape[2]) if out is None else out
        if rows:
            decode(
                q[:rows], pool, batch.tables, batch.contexts[:rows], scale, window=window, out=out[:rows],
                workspace=self._space(q, pool),
            )  # fmt: skip
        if batch.offsets is not None:
            prefill(
                q, pool, batch.tables[rows:], batch.contexts[rows:], batch.offsets, scale, tokens=batch.tokens,
                window=window, out=out,
            )  # fmt: skip
        return out

    def _space(self, q: Tensor, pool: Tensor) -> Workspace:
        if self._workspace is None:
            # Layers run one after another, so one will do for all of them.
            self._workspace = Workspace.create(q.device, self._batch.decodes, q.shape[1], pool.shape[3], q.shape[2])
        return self._workspace


def on_device(batch: PagedBatch) -> DeviceBatch:
    """The same slices with their numbers on the device of the block tables."""
    decodes = len(list(takewhile(lambda length: length == 1, batch.lengths)))
    edges = list(accumulate(batch.lengths[decodes:], initial=decodes))

    def moved(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=batch.tables.device)

    return DeviceBatch(
        decodes=decodes,
        contexts=moved(batch.contexts),
        tables=batch.tables.int(),
        offsets=moved(edges) if len(edges) > 1 else None,
        tokens=edges[-1] - decodes,
        spans=batch.spans,
    )
