"""Timing one step after another on a backend, past its scheduler: what is launched is what the design says.

Contexts are real: the pool is filled by computing prompts first, so that attention reads numbers and not zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from statistics import median
from typing import NamedTuple

from experiments.calibrate.design import Probe
from playground.backend import Backend
from playground.core import COPY_IN, COPY_OUT, MAIN, Copy, Done, Request, Sampling, Slice, Step

ENDLESS = Sampling(ignore_eos=True)
"""Decodes go on, whatever they sample."""


class Sample(NamedTuple):
    """What a probe took, in seconds: on each stage, on the links from each to the next, and on the host to launch."""

    at: float
    """When it began."""
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
            self._prompt(size * spec.block_size, range(filled, filled + size))
            filled += size
            yield filled

    def _prompt(self, tokens: int, blocks: range) -> None:
        id = next(self._ids)
        part = Slice(id, 0, 0, 0, tokens, True, tuple(blocks))
        self._launch([part], starts=(Request(id, 0.0, tokens, 1, 1),), over=(id,))

    def rest(self, seconds: float) -> None:
        """Have the device do nothing."""
        self._backend.wait(self._backend.now() + seconds)

    def time(self, probe: Probe) -> Sample:
        """Of repetitions, the median of all but the first, stage by stage."""
        if probe.copied_blocks:
            return self._copy(probe.copied_blocks)
        going_on = self._open(probe)
        samples = [_sample(self._step(probe, going_on, turn)) for turn in range(probe.repeats)]
        return samples[0] if len(samples) == 1 else _middle(samples[1:])

    def _open(self, probe: Probe) -> list[tuple[int, int, int]]:
        """(sequence, tokens before, first block) of the decodes, which are the same in each repetition."""
        size, block, found = self._backend.spec.block_size, 0, []
        for group in probe.groups:
            for _ in range(group.copies if group.length == 1 else 0):
                found.append((next(self._ids), group.start, block))
                block += -(-probe.end(group) // size)
        return found

    def _step(self, probe: Probe, going_on: Sequence[tuple[int, int, int]], turn: int) -> Done:
        """Decodes one token further each time; chunks are of new sequences."""
        size, block, starts, parts = self._backend.spec.block_size, 0, [], []
        for id, start, first in going_on:
            last = first + -(-(start + probe.repeats) // size)
            blocks = () if turn else tuple(range(first, last))
            if not turn:
                starts.append(Request(id, 0.0, start + 1, probe.repeats, probe.repeats, sampling=ENDLESS))
            parts.append(Slice(id, 0, 0, start + turn, 1, True, blocks))
            block = last
        over: list[int] = []
        for group in probe.groups:
            for _ in range(group.copies if group.length > 1 else 0):
                id, end = next(self._ids), group.start + group.length
                last = block + -(-end // size)
                starts.append(Request(id, 0.0, end + (not group.samples), 1, 1))
                parts.append(Slice(id, 0, 0, group.start, group.length, group.samples, tuple(range(block, last))))
                block, over = last, [*over, id]
        if turn == probe.repeats - 1:
            over += [id for id, *_ in going_on]
        return self._launch(parts, starts=tuple(starts), over=tuple(over))

    def _launch(
        self,
        parts: list[Slice],
        copies: tuple[Copy, ...] = (),
        starts: tuple[Request, ...] = (),
        over: tuple[int, ...] = (),
    ) -> Done:
        """`over`: sequences that no later step names."""
        backend = self._backend
        step = Step(next(self._steps), 0, backend.now(), tuple(parts), copies, starts, self._over)
        self._over = over
        backend.launch(step)
        done = backend.wait()
        assert done is not None
        return done

    def _copy(self, blocks: int) -> Sample:
        """Out and back; the sequence computes its last tokens first, so that there is something to copy."""
        spec, id, places = self._backend.spec, next(self._ids), tuple(range(blocks))
        tokens = blocks * spec.block_size
        start = max(tokens - min(tokens, spec.max_tokens), 0)
        request = Request(id, 0.0, tokens + 1, 1, 1)
        self._launch([Slice(id, 0, 0, start, tokens - start, False, places, MAIN)], starts=(request,))
        out = self._launch([], (Copy(id, 1, 0, places, places, COPY_OUT),))
        back = self._launch([], (Copy(id, 2, 0, places, places, COPY_IN),), over=(id,))
        return Sample(out.started, (out.finished - out.started, back.finished - back.started), (), out.host)


def _middle(samples: Sequence[Sample]) -> Sample:
    """Medians; it began when the first one did."""
    stages, links = (
        zip(*[sample.stages for sample in samples], strict=True),
        zip(*[sample.links for sample in samples], strict=True),
    )
    host = median(sample.host for sample in samples)
    return Sample(samples[0].at, tuple(map(median, stages)), tuple(map(median, links)), host)


def _sample(done: Done) -> Sample:
    if not done.stages:
        return Sample(done.started, (done.finished - done.started,), (), done.host)
    times = tuple(finished - started for started, finished in done.stages)
    links = tuple(after[0] - before[1] for before, after in zip(done.stages, done.stages[1:], strict=False))
    return Sample(done.started, times, links, done.host)
