"""What a checkpoint's `config.json` says beyond its sizes: norms, rotary embedding, biases, the tokens that end it.

It knows no tensor. Defaults are those of the Hugging Face classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from playground.model import ModelShape, shipped


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind`: default, linear, llama3 or yarn; `parameters` are those of the kind."""

    theta: float
    kind: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that the decoder needs to know to use a folder's tensors."""

    shape: ModelShape
    rms_eps: float
    rope: Rope
    eos: tuple[int, ...]
    """Token ids that end a sequence."""
    dtype: str
    """Of the checkpoint: bfloat16, float16 or float32."""
    window: int | None = None
    """Tokens that a query sees at most, itself included, in every layer; None: all."""


def read_config(folder: Path) -> DecoderConfig:
    """The config of a checkpoint's folder; an `EngineError` names the file and what is wrong in it."""
    path = folder / "config.json"
    config = read_json(path)
    return _decoder_config(config, path, _eos(config, folder))


def find_config(path: str | Path) -> DecoderConfig:
    """The config of a checkpoint's folder, of a `config.json`, or of a model that ships with the playground."""
    if Path(path).is_dir():
        return read_config(Path(path))
    if str(path) in shipped():
        path = Path(str(files("playground").joinpath("models", f"{path}.json")))
    config = read_json(Path(path))
    return _decoder_config(config, Path(path), _end_tokens(config.get("eos_token_id")))


def _decoder_config(config: Mapping[str, Any], path: Path, eos: tuple[int, ...]) -> DecoderConfig:
    try:
        shape = ModelShape.from_hf(config)
    except ValueError as error:
        raise EngineError(f"{path}: {error}") from error
    _refuse_unsupported(config, path)
    return DecoderConfig(
        shape=shape,
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, path),
        eos=eos,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        window=_window(config, path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there."""
    if not path.is_file():
        raise EngineError(f"{path}: no such file; model.path must be a Hugging Face checkpoint's folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path}: holds a {type(content).__name__}, not an object; fetch the file again")
    return content


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise EngineError(f"{path}: hidden_act={activation} is not supported; the engine has silu only")


def _window(config: Mapping[str, Any], path: Path) -> int | None:
    """Mistral's window holds for all layers. Qwen names one that it does not use, or uses in some layers only."""
    mistral = "MistralForCausalLM" in config["architectures"]
    window = config.get("sliding_window", 4096 if mistral else None)
    if window is None or not config.get("use_sliding_window", True):
        return None
    if window >= config.get("max_position_embeddings", window + 1):
        return None
    if not mistral:
        raise EngineError(f"{path}: sliding-window attention in some layers is not supported; use another checkpoint")
    return int(window)


def _rope(config: Mapping[str, Any], path: Path) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` of older files."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {"original_max_position_embeddings": config.get("max_position_embeddings"), **stated}
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind not in _NEEDED:
        # "dynamic" and "longrope" look at the longest sequence of a batch: tokens would depend on batching.
        raise EngineError(f"{path}: rope_type={kind} is not supported; the engine has {', '.join(_NEEDED)}")
    if missing := [name for name in _NEEDED[kind] if parameters.get(name) is None]:
        raise EngineError(f"{path}: rope_type={kind} needs {', '.join(missing)} in rope_parameters")
    if (share := stated.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise EngineError(f"{path}: partial_rotary_factor={share} is not supported; heads must rotate whole")
    return Rope(float(stated.get("rope_theta") or config.get("rope_theta") or 10000.0), kind, parameters)


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _eos(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End tokens. `generation_config.json` has the last word: chat models end turns with a token of their own."""
    path = folder / "generation_config.json"
    stated = read_json(path).get("eos_token_id") if path.is_file() else None
    return _end_tokens(config.get("eos_token_id") if stated is None else stated)


def _end_tokens(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
