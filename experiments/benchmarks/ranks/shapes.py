"""Shapes of shipped models with fewer layers, as one of two tensor-parallel ranks has them, or tiny.

Each is a `config.json` of its own, which workers read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SHARED = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def config(model: str, tiny: bool) -> dict[str, Any]:
    """A shipped model's, or a tiny one of its kind."""
    file = files("playground").joinpath("models", f"{model}.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found | {name: value for name, value in SMALL.items() if tiny and name in found}


def share(whole: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """What one of so many tensor-parallel ranks computes, as a model: it has nobody to exchange anything with."""
    return {**whole, **{name: whole[name] // ranks for name in SHARED}}


def write(folder: Path, name: str, content: Mapping[str, Any]) -> str:
    """The path of its `config.json`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)
