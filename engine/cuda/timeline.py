"""Order, overlap and time on one GPU: its streams, its events, and where they lie on the host's clock.

It knows no step and no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from engine.errors import EngineError

Work = Callable[[], Tensor]
"""Queues work whose result lies at the same place each time, and returns that place."""


class Mark(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from here to another mark that was passed."""
        ...


class Timeline(Protocol):
    """What a backend asks of a device."""

    device: torch.device
    pinned: bool
    """Whether buffers on the host must be page-locked."""

    def computing(self) -> AbstractContextManager[Any]:
        """What is queued inside runs in order with all that was queued so."""
        ...

    def copying(self) -> AbstractContextManager[Any]:
        """What is queued inside runs beside the computing."""
        ...

    def uploading(self) -> AbstractContextManager[Any]:
        """Where targets of uploads are made: what computing gave back may yet be in use by what it has queued."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Bring host memory to the device beside the computing; what is computed from now on comes after it."""
        ...

    def receiving(self) -> AbstractContextManager[Any]:
        """What is queued inside runs beside the computing: hidden states that come from another stage."""
        ...

    def sending(self) -> AbstractContextManager[Any]:
        """Likewise those that go to another stage."""
        ...

    def mark(self) -> Mark:
        """The point that the current stream has been told to reach."""
        ...

    def after(self, mark: Any, /) -> None:
        """What is queued on the current stream from now on waits until a mark of any stream is passed."""
        ...

    def capture(self, work: Work) -> Work:
        """Work that can be queued again and again at the price of one launch. `work` itself is run, too."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        ...

    def release(self) -> None:
        """Give memory back that nobody uses."""
        ...


class CudaTimeline:
    """Streams for computing, for uploads, for swap copies, and for either direction between stages."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise EngineError("device=cuda: no CUDA device is visible; take device=cpu, or check nvidia-smi")
        self.device = device
        self._compute, self._uploads, self._copies = (torch.cuda.Stream(device) for _ in range(3))
        self._receives, self._sends = (torch.cuda.Stream(device) for _ in range(2))
        self._pool = torch.cuda.graph_pool_handle()
        self._replays: WeakSet[Work] = WeakSet()
        """Captured graphs that somebody has."""

    def computing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._compute)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def uploading(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._uploads)

    def receiving(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._receives)

    def sending(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._sends)

    def upload(self, target: Tensor, source: Tensor) -> None:
        with self.uploading():
            target.copy_(source, non_blocking=True)
        self._compute.wait_stream(self._uploads)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def after(self, mark: Any, /) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def capture(self, work: Work) -> Work:
        """All graphs share one pool: they never run at the same time, and what one leaves there nobody reads."""
        if not self._replays:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        with self.computing():
            work()  # compiles kernels and fills the libraries' caches, which a capture must not
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: it empties caches and collects garbage each time, for dozens of captures. Other
            # threads may call CUDA meanwhile: torch.distributed has one that looks after its collectives.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        self._replays.add(replay)
        return replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        torch.cuda.empty_cache()


REBASE = 10.0
"""Seconds after which another mark becomes the base: elapsed times are float32 milliseconds."""


class Clock:
    """Seconds since the run began, for the host and for marks.

    The two oscillators drift apart by parts in a million. What the host knows bounds a mark's time from both sides,
    and where the bounds are broken the mapping is shifted to fit.
    """

    def __init__(self, timeline: Timeline) -> None:
        timeline.synchronize()
        with timeline.computing():
            self._base = timeline.mark()
        timeline.synchronize()
        self._origin = perf_counter()
        self._offset = 0.0
        """When the base was passed."""

    def now(self) -> float:
        return perf_counter() - self._origin

    def between(self, begun: Mark, ended: Mark, earliest: float) -> tuple[float, float]:
        """When two marks were passed. The first was not before `earliest`, the second is not after now."""
        latest = self.now()
        length = begun.elapsed_time(ended) / 1e3
        started = self._offset + self._base.elapsed_time(begun) / 1e3
        shift = max(earliest - started, 0.0) or min(latest - length - started, 0.0)
        self._offset += shift
        started = max(started + shift, earliest)
        finished = min(max(started + length, started), latest)
        if finished - self._offset > REBASE:
            self._base, self._offset = ended, finished
        return started, finished
