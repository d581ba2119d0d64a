"""How long calls take on a GPU, launch gaps left out: replays of a graph between events."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD_BYTES = 256 << 20
"""What sets of inputs must take together so that none is found in the cache: four times an H200's."""

LONGEST = 4e-3
"""Seconds that one replay should take: enough to time, little to wait for."""


def microseconds(calls: Sequence[Callable[[], Any]], *, replays: int = 7) -> float:
    """Median time of one call in a graph; `calls` do the same on different inputs and take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    rough = max((time.perf_counter() - started) / len(calls), 2e-6)
    rounds = max(1, min(100, math.ceil(LONGEST / rough / len(calls))))
    graph = _captured(calls, rounds)
    graph.replay()
    spans = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(spans)


def _captured(calls: Sequence[Callable[[], Any]], rounds: int) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # what a kernel keeps for each stream is made before the capture
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def sets_for(size: int, most: int = 64) -> int:
    """Sets of inputs of `size` bytes that together do not fit the cache."""
    return max(1, min(most, math.ceil(COLD_BYTES / max(size, 1))))
