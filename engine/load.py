"""From a Hugging Face folder to a decoder and a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.config import DecoderConfig, read_config
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.weights import read_weights
from kernels.registry import select

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
    weights = read_weights(folder, config.shape, _dtype(dtype, config), device)
    return Decoder(config, weights, select(torch.device(device).type, kernels))


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
