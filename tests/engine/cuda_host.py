"""A device that is the host: everything that the CUDA backend does but streams, events and kernels, on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch

from engine.config import read_config
from engine.cuda.backend import CudaBackend
from engine.models.decoder import Decoder
from engine.weights import read_weights
from kernels import reference
from kernels.batch import DeviceBatch, PagedBatch
from kernels.registry import select
from tests.engine.driver import Driver


@dataclass
class HostMark:
    """Passed when made, unless somebody holds it back."""

    time: float
    passed: bool = True

    def query(self):
        return self.passed

    def elapsed_time(self, other):
        return (other.time - self.time) * 1e3


class HostTimeline:
    """Work is done when it is queued. `hold`: marks made meanwhile are not passed before `let_go`."""

    pinned = False
    device = torch.device("cpu")

    def __init__(self):
        self.hold = False
        self.held = []
        self.captured = 0

    def computing(self):
        return nullcontext()

    def copying(self):
        return nullcontext()

    def uploading(self):
        return nullcontext()

    def receiving(self):
        return nullcontext()

    def sending(self):
        return nullcontext()

    def upload(self, target, source):
        target.copy_(source)

    def mark(self):
        mark = HostMark(perf_counter(), not self.hold)
        if self.hold:
            self.held.append(mark)
        return mark

    def after(self, mark):
        pass

    def let_go(self, count=None):
        """Pass the oldest marks."""
        for mark in self.held[:count]:
            mark.time, mark.passed = perf_counter(), True
        del self.held[:count]

    def capture(self, work):
        work()
        self.captured += 1
        return work

    def synchronize(self):
        pass

    def release(self):
        pass


class Unpacked:
    """Attention of a `DeviceBatch` by the reference, which wants a `PagedBatch`: padding is left out."""

    def __init__(self, batch: DeviceBatch):
        contexts = batch.contexts.tolist()
        offsets = [] if batch.offsets is None else batch.offsets.tolist()
        lengths = [1] * batch.decodes + [end - start for start, end in pairwise(offsets)]
        assert len(lengths) == len(contexts) == len(batch.tables)
        assert all(
            (context == 0) == (length == 0)
            for context, length in zip(contexts[batch.decodes :], lengths[batch.decodes :], strict=True)
        )
        assert batch.tokens >= sum(lengths[batch.decodes :])
        assert batch.contexts.dtype == batch.tables.dtype == torch.int32
        kept = [index for index, context in enumerate(contexts) if context]
        self.rows = [index for index in range(batch.decodes) if contexts[index]] + list(
            range(batch.decodes, sum(lengths))
        )
        self.batch = PagedBatch(
            [contexts[index] - lengths[index] for index in kept],
            [lengths[index] for index in kept],
            batch.tables[kept].long(),
            0,
        )

    def __call__(self, q, pool, scale, window=None):
        out = q.new_zeros(len(q), q.shape[1] * q.shape[2])
        if self.rows:
            batch = replace(self.batch, block_size=pool.shape[1])
            out[self.rows] = reference.Attention(batch)(q[self.rows], pool, scale, window)
        return out


class UnpackedLatent(Unpacked):
    """Likewise latent attention."""

    def __call__(self, q, pool, rank, scale):
        out = q.new_zeros(*q.shape[:2], rank)
        if self.rows:
            batch = replace(self.batch, block_size=pool.shape[1])
            out[self.rows] = reference.MlaAttention(batch)(q[self.rows], pool, rank, scale)
        return out


def place_latent(*arguments):
    reference.place_latent(*arguments)


def place_qkv(*arguments):
    """The reference's, under a name of its own: the decoder takes it for a fused one."""
    return reference.place_qkv(*arguments)


def host_ops():
    """As on a GPU: they take padding, and lengths that the host does not know."""
    ops = replace(select("cpu"), attention=Unpacked, place_qkv=place_qkv)
    return replace(ops, mla_attention=UnpackedLatent, place_latent=place_latent)


def load_on_host(folder) -> Decoder:
    """A checkpoint's decoder that computes on the host as it would on a GPU."""
    config = read_config(folder)
    return Decoder(config, read_weights(folder, config.shape, torch.float32, "cpu"), host_ops())


class BackendDriver(Driver):
    """Drives a backend, one step at a time."""

    def __init__(self, backend: CudaBackend, blocks, host_blocks=()):
        super().__init__(None, blocks, backend.spec.block_size, host_blocks)
        self.backend = backend

    def run(self, *parts):
        step = self.step(*parts)
        self.launch(step)
        for _ in step.lanes:
            self.take_back(self.backend.wait())

    def launch(self, step):
        self.backend.launch(step)
