"""Bandwidth of swap."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from engine.cuda.swap import Swap
from engine.kv import block_bytes
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE
from experiments.benchmarks.gpu.engine.subject import Subject


def time_swap(report: Report, subject: Subject) -> None:
    pool, blocks = subject.backend._pool, 640
    swap = Swap(pool, blocks, pinned=True)
    piece = block_bytes(subject.model.shape, SIZE, subject.model.dtype)
    pool.data[:, :blocks].normal_()
    kept = pool.data[:, :blocks].clone()
    torch.cuda.synchronize()
    order = np.random.default_rng(3).permutation(blocks).tolist()
    for name, there in (("blocks in order", list(range(blocks))), ("blocks in any order", order)):
        spans = {}
        for way, move in (("out", partial(swap.out, order, there)), ("in", partial(swap.back, there, order))):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with subject.backend._timeline.copying():
                move()
                if way == "in":
                    pool.data[:, :blocks].zero_()
                begun.record()
                move()
                ended.record()
            torch.cuda.synchronize()
            spans[way] = begun.elapsed_time(ended) / 1e3
        same = torch.equal(pool.data[:, :blocks], kept)
        report.check(f"swap round trip, {name}", same)
        report.row(
            f"swap of {blocks} blocks, {name}", blocks * piece / spans["out"] / 1e9, "GB/s out",
            back=blocks * piece / spans["in"] / 1e9, gigabytes=blocks * piece / 1e9,
        )  # fmt: skip
