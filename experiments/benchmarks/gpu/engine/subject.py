"""A model that is timed, and its backend."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from engine.cuda.backend import CudaBackend
from engine.load import random_model
from engine.models.decoder import Decoder
from experiments.benchmarks.gpu.ceilings import COPY, MATMUL


class Subject:
    """Random bf16 weights of a shipped model's shape and the backend over them, each made when first asked for."""

    def __init__(self, name: str, facts: dict[str, Any]) -> None:
        self.name = name
        self._facts = facts

    @cached_property
    def model(self) -> Decoder:
        began = time.perf_counter()
        model = random_model(self.name, "bfloat16", "cuda")
        torch.cuda.synchronize()
        self._facts["random_weights_s"] = time.perf_counter() - began
        return model

    @cached_property
    def backend(self) -> CudaBackend:
        model, began = self.model, time.perf_counter()
        backend = CudaBackend(model, max_seqs=256, max_tokens=16384, max_length=8192)
        made = time.perf_counter()
        backend.now()
        self._facts["backend_s"] = made - began
        self._facts["warm_up_s"] = time.perf_counter() - made
        self._facts["memory"] = asdict(backend.memory)
        self._facts["kv_blocks"] = backend.spec.blocks
        self._facts["graphs"] = len(backend._graphs or ())
        print(
            f"{self.name}: {backend.spec.blocks} blocks; {backend.memory}; {self._facts['graphs']} graphs", flush=True
        )
        return backend

    def limit(self, rows: int, context: float) -> float:
        """Seconds that a decode step needs to read weights and KV."""
        shape = self.model.shape
        weights = shape.weight_bytes - shape.embedding_bytes
        return (weights + rows * context * shape.kv_bytes_per_token) / COPY

    def prefill_limit(self, count: int, prompt: int, outputs: int = 1) -> float:
        """Seconds that the products of prompts need at the matrix units' rate."""
        shape = self.model.shape
        linear = count * prompt * shape.layers * shape.linear_flops
        attention = count * prompt * (prompt + 1) / 2 * shape.layers * shape.attention_flops
        return (linear + attention + count * outputs * shape.head_flops) / MATMUL

    def release(self) -> None:
        """Give the device's memory back; what is asked for again is made anew."""
        if "backend" in self.__dict__:
            self.backend.close()
        self.__dict__.pop("backend", None)
        self.__dict__.pop("model", None)
        gc.collect()
        torch.cuda.empty_cache()
