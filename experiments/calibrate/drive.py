"""Timing one step after another on a backend, past its scheduler: what is launched is what the design says.

Contexts are real: the pool is filled by computing prompts first, so that attention reads numbers and not zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from experiments.calibrate.design import Probe
from playground.backend import Backend
from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Done, Request, Slice, Step


class Sample(NamedTuple):
    """What a probe took, in seconds: on each stage, on the links from each to the next, and on the host to launch."""

    stages: tuple[float, ...]
    links: tuple[float, ...]
    host: float


class Driver:
    """Launches probes on a backend that serves nobody else meanwhile."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._steps, self._ids = count(), count()
        self._over: tuple[int, ...] = ()
        """Sequences of the step before, which the next one ends."""

    def fill(self, blocks: int) -> Iterator[int]:
        """Compute prompts into the first blocks of the pool; how many are filled by now, time and again."""
        spec, filled = self._backend.spec, 0
        most = min(spec.max_tokens, spec.max_length - 1) // spec.block_size
        while filled < blocks:
            size = min(most, blocks - filled)
            self._run([(0, size * spec.block_size, True)], filled)
            filled += size
            yield filled

    def time(self, probe: Probe) -> Sample:
        if probe.copied_blocks:
            return self._copy(probe.copied_blocks)
        slices = [(g.start, g.length, g.samples) for g in probe.groups for _ in range(g.count)]
        return _sample(self._run(slices, 0))

    def _run(self, slices: list[tuple[int, int, bool]], first_block: int) -> Done:
        """One step of (start, length, samples)."""
        size, requests, parts = self._backend.spec.block_size, [], []
        for start, length, samples in slices:
            id, end = next(self._ids), start + length
            blocks = -(-end // size)
            requests.append(Request(id, 0.0, end + (not samples), 1, 1))
            parts.append(Slice(id, 0, 0, start, length, samples, tuple(range(first_block, first_block + blocks))))
            first_block += blocks
        return self._launch(parts, starts=tuple(requests))

    def _launch(self, parts: list[Slice], copies: tuple[Copy, ...] = (), starts: tuple[Request, ...] = ()) -> Done:
        backend = self._backend
        step = Step(next(self._steps), 0, backend.now(), tuple(parts), copies, starts, self._over)
        self._over = tuple(request.id for request in starts)
        backend.launch(step)
        done = backend.wait()
        assert done is not None
        return done

    def _copy(self, blocks: int) -> Sample:
        """Out and back; the sequence computes its first block, so that there is something to copy."""
        spec, (id, *_) = self._backend.spec, [next(self._ids)]
        places = tuple(range(blocks))
        tokens = blocks * spec.block_size
        start = max(tokens - min(tokens, spec.max_tokens), 0)
        request = Request(id, 0.0, tokens + 1, 1, 1)
        self._launch([Slice(id, 0, 0, start, tokens - start, False, places, MAIN)], starts=(request,))
        self._over = ()
        out = self._launch([], (Copy(id, 1, 0, places, places, COPY_OUT),))
        back = self._launch([], (Copy(id, 2, 0, places, places, COPY_IN),))
        self._over = (id,)
        return Sample((out.finished - out.started, back.finished - back.started), (), out.host)


def _sample(done: Done) -> Sample:
    if not done.stages:
        return Sample((done.finished - done.started,), (), done.host)
    times = tuple(finished - started for started, finished in done.stages)
    links = tuple(after[0] - before[1] for before, after in zip(done.stages, done.stages[1:], strict=False))
    return Sample(times, links, done.host)
