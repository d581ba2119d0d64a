"""Exchanges that are carried out beside what is computed: on a stream of their own, or by a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.models.passing import Pending

T = TypeVar("T")


class SideStream:
    """Of a GPU. What is exchanged was computed when it begins; who asks for its result computes on when it is there.

    In the capture of a graph the stream is part of the graph from the first exchange on, and joined by its result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Urgent: an exchange holds few multiprocessors, and all other ranks wait for it.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, exchange: Callable[[], T]) -> Pending[T]:
        # Whatever computing has been told so far comes first: also the last use of memory that is given out again here.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = exchange()
            done = self._stream.record_event()

        def pending(_: object = exchange) -> T:  # what it reads must not be given out again before it is done
            torch.cuda.current_stream(self._device).wait_event(done)
            return result

        return pending


class SideThread:
    """Of a process. Every exchange must go through it, in an order that is the same on all ranks."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "exchange", torch.set_num_threads, (1,))

    def __call__(self, exchange: Callable[[], T]) -> Pending[T]:
        return self._thread.submit(_inferring, exchange).result


def _inferring(exchange: Callable[[], T]) -> T:
    """The mode is a thread's own, and tensors of a pass may be changed in it only."""
    with torch.inference_mode():
        return exchange()


def beside(device: torch.device) -> SideStream | SideThread:
    """As the device can."""
    return SideStream(device) if device.type == "cuda" else SideThread()
