"""Logits of tiny models, slice by slice, against float32 on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import find_config
from engine.kv import KvPool
from engine.load import load_model
from engine.models.decoder import Decoder, Inputs
from engine.weights import Linear, read_weights
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE
from kernels.batch import DeviceBatch, PagedBatch
from kernels.registry import select

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of the relative error of a tiny model's logits, against float32 on a CPU with the same weights."""


def check_logits(report: Report, folder: Path, name: str) -> None:
    """Prefill whole, in chunks with history, and token by token; fresh tokens each time."""
    dtype = getattr(torch, name)
    config = find_config(folder)
    exact = Decoder(config, _widened(read_weights(folder, config.shape, dtype, "cpu")), select("cpu"))
    model = load_model(folder, name, "cuda")
    for cut in ([97], [40, 40, 17], [60, *[1] * 37], [1, 96]):
        tokens = torch.randint(0, config.shape.vocabulary, (97,))
        wanted = _cpu_logits(exact, tokens)
        out = _gpu_logits(model, tokens, cut)
        error = float((out.double().cpu() - wanted.double()).norm() / wanted.double().norm())
        good = error < BOUNDS[name]
        cuts = f"{len(cut)} slices from {cut[0]}"
        report.check(f"logits {config.shape.architecture} {name}: {cuts}", good, error=error, bound=BOUNDS[name])


def _widened(weights: Any) -> Any:
    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float()
        if isinstance(value, Linear):
            return Linear(value.weight.float(), None if value.bias is None else value.bias.float())
        return value

    layers = tuple(
        type(layer)(**{name: wide(getattr(layer, name)) for name in type(layer).__dataclass_fields__})
        for layer in weights.layers
    )
    return type(weights)(weights.embedding.float(), layers, weights.norm.float(), weights.head.float())


def _cpu_logits(model: Decoder, tokens: Tensor) -> Tensor:
    count = len(tokens)
    pool = KvPool(model.shape, -(-count // SIZE), SIZE, model.dtype)
    places = torch.arange(count)
    pages = PagedBatch([0], [count], torch.arange(pool.blocks)[None], SIZE)
    with torch.inference_mode():
        return model(Inputs(tokens, places, places, places, pages), pool)


def _gpu_logits(model: Decoder, tokens: Tensor, cut: Sequence[int]) -> Tensor:
    """Logits of all positions, computed slice by slice in a pool of NaN with its blocks in a random order."""
    blocks = -(-len(tokens) // SIZE)
    pool = KvPool(model.shape, blocks + 3, SIZE, model.dtype, "cuda")
    pool.data.fill_(math.nan)
    table = torch.randperm(blocks + 3)[:blocks].to("cuda", torch.int32)
    parts, start = [], 0
    with torch.inference_mode():
        for length in cut:
            positions = torch.arange(start, start + length, device="cuda")
            places = table[positions // SIZE].long() * SIZE + positions % SIZE
            batch = DeviceBatch(
                decodes=int(length == 1),
                contexts=torch.tensor([start + length], dtype=torch.int32, device="cuda"),
                tables=table[None],
                offsets=None if length == 1 else torch.tensor([0, length], dtype=torch.int32, device="cuda"),
                tokens=0 if length == 1 else length,
            )
            ids = tokens[start : start + length].to("cuda")
            parts.append(model(Inputs(ids, positions, places, None, batch), pool))
            start += length
    return torch.cat(parts)
