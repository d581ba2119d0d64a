"""The backend on torch: one worker thread carries out steps in order, and the clock is the wall's.

It decides nothing: what is in a step is done, as soon as everything before it is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from threading import TIMEOUT_MAX, Condition
from time import perf_counter
from typing import Any

import torch

from engine.errors import EngineError, StepFailed
from engine.kv import KvPool, block_bytes
from engine.models.decoder import Decoder
from engine.pooled import ALONE, Passes, Pooled
from engine.runner import Pools, Runner, in_order
from playground.core import Done, Request, Spec, Step

MEMORY_SHARE = 0.25
"""Share of the free memory that the KV pool takes where `blocks` is not given."""


class TorchBackend:
    """One rank and one pipeline stage on the model's device.

    `blocks` is the KV pool's size; None takes a quarter of the free memory, at most what `max_seqs` sequences of
    `max_length` tokens need. `max_length` defaults to the model's own. The clock starts at the first `now()` or
    `launch`, after a warm-up pass, so neither loading nor warming up counts.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        blocks: int | None = None,
        block_size: int = 16,
        host_blocks: int = 0,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_length: int | None = None,
    ) -> None:
        limits = Spec(
            blocks=1 if blocks is None else blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_length=longest_sequence(model, max_length),
            forwards_tokens=model.part.forwards,
            **room_of(model),
        )
        self.spec = replace(limits, blocks=_fitting_blocks(model, limits)) if blocks is None else limits
        self._runner = Runner(model, {0: make_pools(model, self.spec)})
        self._worker = ThreadPoolExecutor(1, "engine", torch.set_num_threads, (torch.get_num_threads(),))
        self._changed = Condition()
        # All below are guarded by `_changed`.
        self._ready: deque[Done] = deque()
        self._due = 0
        self._failure: tuple[int, BaseException] | None = None
        self._origin: float | None = None

    def start(self) -> None:
        """Warm up and set the clock to 0. Not while steps are in flight."""
        length = min(8, self.spec.block_size, self.spec.max_length)
        self._worker.submit(self._runner.warm_up, Request(0, 0.0, length, 1)).result()
        self._origin = perf_counter()

    def now(self) -> float:
        """Seconds since the run began; the first call begins it."""
        if self._origin is None:
            self.start()
        return self._clock()

    def launch(self, step: Step, pooled: Pooled = ALONE) -> None:
        """Queue a step for the worker; of a step that others take part in, all lanes come back."""
        launched = self.now()
        with self._changed:
            self._due += len(pooled or step.lanes)
        future = self._worker.submit(self._carry_out, step, pooled, launched)
        future.add_done_callback(partial(self._note_failure, step.id))

    def learn(self, tokens: Iterable[tuple[int, int, int]]) -> None:
        """Of tokens that another stage sampled nothing new: whoever needs them hears of them from that stage."""

    def wait(self, until: float = inf) -> Done | None:
        """The next completion in order of finish; None once `until` has passed without one.

        A step that raised makes this raise `StepFailed` with the step's id, now and ever after.
        """
        self.now()
        with self._changed:
            if not self._due and until == inf:
                raise RuntimeError("wait: nothing is in flight and no time was given to wait for")
            self._sleep(until)
            if self._ready and self._ready[0].finished <= until:
                self._due -= 1
                return self._ready.popleft()
            if self._failure is not None:
                step, error = self._failure
                raise StepFailed(f"step {step} failed on the worker: {error}") from error
            return None

    def close(self) -> None:
        """Join the worker; steps that it has not begun are dropped."""
        self._worker.shutdown(cancel_futures=True)

    def _clock(self) -> float:
        assert self._origin is not None
        return perf_counter() - self._origin

    def _sleep(self, until: float) -> None:
        """Hold the lock's place until a completion, a failure, or `until`.

        The worker stamps `finished` under the same lock, so what is not ready when this returns finishes later.
        """
        while not self._ready and self._failure is None:
            left = until - self._clock()
            if left <= 0:
                return
            self._changed.wait(min(left, TIMEOUT_MAX))

    # --- on the worker

    def _carry_out(self, step: Step, pooled: Pooled, launched: float) -> None:
        if self._failure is not None:
            return  # what an earlier step did not compute, this one would build upon
        self._runner.begin(step)
        for lane in in_order(pooled or step.lanes):
            self._carry_out_lane(step, lane, pooled.get(lane, ()), launched)
        self._runner.end(step)

    def _carry_out_lane(self, step: Step, lane: str, pooled: Passes, launched: float) -> None:
        self._runner.call(step, lane)
        began = self._clock()
        job = self._runner.prepare(step, lane, pooled)
        started = self._clock()
        outcome = job()
        with self._changed:
            finished = self._clock()
            self._ready.append(
                Done(step.id, lane, launched, started, finished, **outcome._asdict(), host=started - began)
            )
            self._changed.notify()

    def _note_failure(self, step: int, future: Future[None]) -> None:
        if future.cancelled() or (error := future.exception()) is None:
            return
        with self._changed:
            self._failure = (step, error)
            self._changed.notify()


def make_pools(model: Decoder, spec: Spec) -> Pools:
    """The KV pools of one rank, as a spec says."""

    shape, size, dtype, spare = model.shape, spec.block_size, model.dtype, _spare(model)
    host = None
    if spec.host_blocks:
        host = KvPool(shape, spec.host_blocks, size, dtype, "cpu", "kv.host_blocks", spare)
    return Pools(KvPool(shape, spec.blocks, size, dtype, model.device, spare=spare), host)


def room_of(model: Decoder) -> dict[str, Any]:
    """What a spec says of layers that may move."""
    mover = model.part.mover
    return {} if mover is None else {"layers": mover.layers, "spare_layers": mover.spare}


def _spare(model: Decoder) -> int:
    return 0 if model.part.mover is None else model.part.mover.spare


def longest_sequence(model: Decoder, asked: int | None) -> int:
    """The most tokens of a sequence: as asked, or the model's own limit."""
    longest = model.shape.max_length
    if asked is not None and asked > longest:
        raise EngineError(f"max_length={asked} is more than the model's {longest}; lower it or use another model")
    return longest if asked is None else asked


def _fitting_blocks(model: Decoder, limits: Spec) -> int:
    """As many blocks as a share of the free memory holds, and no more than could ever be used."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = int(free * MEMORY_SHARE) // block_bytes(model.shape, limits.block_size, model.dtype, limits.spare_layers)
    if fitting < 1:
        raise EngineError(f"kv.block_size={limits.block_size}: no memory for one block; lower it or free memory")
    return min(fitting, limits.max_seqs * limits.blocks_for(limits.max_length))
