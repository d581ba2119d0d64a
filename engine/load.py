"""From a Hugging Face folder to a decoder and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import DecoderConfig, find_config, read_config
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.weights import Weights, random_weights, read_weights
from kernels.registry import Need, select
from playground.model import ModelShape

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    path: str | Path, dtype: str = "float32", device: str = "cpu", kernels: Mapping[str, str] | None = None
) -> Decoder:
    """The decoder of a checkpoint's folder.

    `dtype` is one of `DTYPES`, or `auto` for the checkpoint's own. `kernels` names implementations by operation where
    the fastest is not wanted. What is wrong with the folder is an `EngineError`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise EngineError(f"model.path={path}: no such folder; give a Hugging Face checkpoint's folder")
    config = read_config(folder)
    return _decoder(config, _dtype(dtype, config), device, kernels, partial(read_weights, folder))


def random_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    kernels: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder with the shape of a checkpoint's folder, a `config.json` or a shipped model, and random weights."""
    config = find_config(path)
    return _decoder(config, _dtype(dtype, config), device, kernels, partial(random_weights, seed=seed))


def _decoder(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: str,
    kernels: Mapping[str, str] | None,
    weights: Callable[[ModelShape, torch.dtype, str], Weights],
) -> Decoder:
    """Operations first: what no kernel can do is told before gigabytes are read."""
    _check_device(device)
    shape = config.shape
    need = Need(dtype, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden)
    ops = select(torch.device(device).type, kernels, need)
    try:
        return Decoder(config, weights(shape, dtype, device), ops)
    except torch.OutOfMemoryError as error:
        needed = shape.parameters * dtype.itemsize / 1e9
        raise EngineError(
            f"model: {needed:.1f} GB of weights in {dtype} do not fit the memory of {device}; take a smaller model, a "
            "smaller dtype or another device"
        ) from error


def _check_device(device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device={device}: no CUDA device is visible; take device=cpu, or check nvidia-smi")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder, as transformers builds it."""
    from transformers import AutoTokenizer  # importing it takes more than a second

    folder = Path(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise EngineError(f"{folder / 'tokenizer.json'}: no such file; the folder must hold its tokenizer")
    return AutoTokenizer.from_pretrained(folder)


def _dtype(name: str, config: DecoderConfig) -> torch.dtype:
    name = config.dtype if name == "auto" else name
    if name not in DTYPES:
        raise EngineError(f"model.dtype={name} is not supported; choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]
