"""Numbers of one step on their way to the device and back, in buffers that live as long as the step is in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.timeline import Timeline

Words = NDArray[np.int64]

ALIGNED = 16
"""Words at whose multiples parts begin: kernels are compiled anew for pointers that are not aligned alike."""


class Parcel:
    """A page-locked buffer and its twin on the device, and one for the tokens that come back."""

    def __init__(self, timeline: Timeline, answers: int, words: int = 4096) -> None:
        self._timeline = timeline
        self.answers = torch.empty(answers, dtype=torch.int64, pin_memory=timeline.pinned)
        """Tokens of a step in flight: read them when it is done."""
        self._shares = torch.empty(0, dtype=torch.float64)
        """Logprobs that come back, if somebody asks for them."""
        self._grow(words)

    def send(self, parts: Sequence[Words]) -> list[Tensor]:
        """Upload the parts together; each one's place on the device, good until the next call."""
        starts, used = [], 0
        for part in parts:
            starts.append(used)
            used += -(-len(part) // ALIGNED) * ALIGNED
        if used > len(self._host):
            self._grow(2 * used)
        for start, part in zip(starts, parts, strict=True):
            self._words[start : start + len(part)] = part
        self._timeline.upload(self._device[:used], self._host[:used])
        return [self._device[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]

    def fetch(self, table: Tensor) -> Tensor:
        """Queue a table's way to the host, float64: there it can be read when the step is done."""
        if table.numel() > self._shares.numel():
            self._shares = torch.empty(2 * table.numel(), dtype=torch.float64, pin_memory=self._timeline.pinned)
        return self._shares[: table.numel()].view(table.shape).copy_(table, non_blocking=True)

    def _grow(self, words: int) -> None:
        self._host = torch.empty(words, dtype=torch.int64, pin_memory=self._timeline.pinned)
        self._words: Words = self._host.numpy()
        with self._timeline.uploading():
            self._device = torch.empty(words, dtype=torch.int64, device=self._timeline.device)


class Parcels:
    """Parcels in use and at hand: as many as there are steps in flight."""

    def __init__(self, timeline: Timeline, answers: int) -> None:
        self._timeline = timeline
        self._answers = answers
        self._free: list[Parcel] = []

    def take(self) -> Parcel:
        return self._free.pop() if self._free else Parcel(self._timeline, self._answers)

    def give_back(self, parcel: Parcel) -> None:
        """Only when the device is done with it."""
        self._free.append(parcel)
