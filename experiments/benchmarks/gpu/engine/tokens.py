"""Tokens of tiny models, served in many ways, against the CPU engine's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.cuda.backend import CudaBackend
from engine.load import load_model
from engine.models.decoder import Decoder
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE, policy, served
from playground.core import Request, Sampling
from playground.draft import How
from playground.rank import hash_tokens


def conversations(sampling: Sampling | None = None) -> list[Request]:
    """Prompts of many lengths, some of which begin alike."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 512, 70).tolist()
    requests = []
    for id in range(14):
        own = rng.integers(3, 512, int(rng.integers(1, 110))).tolist()
        prompt = tuple((shared if id % 3 == 0 else []) + own)
        how = sampling or Sampling(ignore_eos=True)
        if how.temperature > 0:
            how = replace(how, seed=id)
        requests.append(
            Request(id, 0.0, len(prompt), 24 + id, prompt=prompt, hashes=hash_tokens(prompt, SIZE), sampling=how)
        )
    return requests


TIGHT: dict[str, Any] = dict(blocks=26)
WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "graphs": ({}, dict(ahead=1)),
    "no graphs": (dict(graphs=False), dict(ahead=1)),
    "two ahead": ({}, dict(ahead=2)),
    "three ahead, no graphs": (dict(graphs=False), dict(ahead=3)),
    "chunks of 16": ({}, dict(tokens=16, ahead=2)),
    "recompute": (TIGHT, dict(ahead=1)),
    "recompute, two ahead": (TIGHT, dict(ahead=2)),
    "swap": (TIGHT | dict(host_blocks=64), dict(how=How.SWAP, ahead=1)),
    "swap, two ahead": (TIGHT | dict(host_blocks=64), dict(how=How.SWAP, ahead=2)),
    "prefix cache": ({}, dict(ahead=2)),
}
"""Options of the backend and of the policy."""


def tiny_backend(model: Decoder, **options: Any) -> CudaBackend:
    sizes = dict(blocks=400, block_size=SIZE, max_seqs=8, max_tokens=512, max_length=512)
    backend = CudaBackend(model, **(sizes | options))
    backend.now()
    backend._pool.data.fill_(math.nan)
    torch.cuda.synchronize()
    return backend


def check_tokens(report: Report, architecture: str, model: Decoder, expected: dict[int, list[int]]) -> None:
    for way, (options, rules) in WAYS.items():
        backend = tiny_backend(model, **options)
        cached = way == "prefix cache"
        found = served(backend, conversations(), policy(**rules), prefix_cache=cached)
        backend.close()
        wrong = {
            id: _first_difference(found.tokens[id], expected[id]) for id in expected if found.tokens[id] != expected[id]
        }
        hits = sum(end.sequence.cached_tokens for end in found.recorder.ends.values())
        happened = found.preemptions > 0 if options.get("blocks") else hits > 0 if cached else True
        report.check(
            f"greedy float32 {architecture}: {way}", not wrong and happened, differing=wrong,
            preemptions=found.preemptions, cached=hits,
        )  # fmt: skip
    drawn = []
    for way in ("graphs", "three ahead, no graphs", "recompute, two ahead"):
        options, rules = WAYS[way]
        backend = tiny_backend(model, **options)
        requests = conversations(Sampling(temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True))
        drawn.append(served(backend, requests, policy(**rules)).tokens)
        backend.close()
    report.check(f"drawn float32 {architecture}: graphs, none, recompute", drawn[0] == drawn[1] == drawn[2])
    report.check(f"drawn float32 {architecture}: not greedy", drawn[0] != expected)


def _first_difference(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def check_bfloat16(report: Report, folder: Path) -> None:
    """Rounding depends on what else is in a batch, so ways of serving differ; the same way does not."""
    model = load_model(folder, "bfloat16", "cuda")
    found = []
    for way in ("two ahead", "two ahead", "no graphs", "chunks of 16"):
        options, rules = WAYS[way]
        backend = tiny_backend(model, **options)
        found.append(served(backend, conversations(), policy(**rules)).tokens)
        backend.close()
    alike = [sum(tokens[id] == found[0][id] for id in tokens) for tokens in found]
    report.check("bfloat16: the same way twice", found[0] == found[1], sequences=len(found[0]), alike_by_way=alike)
