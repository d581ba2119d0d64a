"""A decoder's shape as its Hugging Face `config.json` states it: shared by the roofline and the engine.

Sizes only. It does not know a tensor, a device, or how the layers are split over stages and ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypedDict

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder-only transformer with gated MLPs. Lengths in tokens, widths in elements."""

    architecture: str
    """As in `architectures[0]`: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, ..."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    """On the query, key and value projections."""
    output_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    max_length: int = 1 << 20
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "max_length"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"model.{name}={value} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")
        if self.dtype_bytes not in (1, 2, 4):
            raise ValueError(f"model.dtype_bytes={self.dtype_bytes} must be 1, 2 or 4")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that the content of a `config.json` describes; a `ValueError` names what is wrong in it."""
        architecture = _architecture(config)
        if config.get("quantization_config"):
            raise ValueError("quantization_config: quantised checkpoints are not supported; use the bf16 checkpoint")
        heads = _size(config, "num_attention_heads")
        return cls(
            architecture=architecture,
            layers=_size(config, "num_hidden_layers"),
            hidden=_size(config, "hidden_size"),
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", _head_dim(architecture, _size(config, "hidden_size"), heads)),
            intermediate=_size(config, "intermediate_size"),
            vocabulary=_size(config, "vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_length=_size(config, "max_position_embeddings"),
            dtype_bytes=_dtype_bytes(config),
            **_ARCHITECTURES[architecture](config),
        )

    @classmethod
    def read(cls, path: str | Path) -> ModelShape:
        """From a checkpoint's folder, a `config.json` file, or the name of a model that ships with the playground."""
        file = _find(path)
        try:
            return cls.from_hf(_parse(file.read_bytes()))
        except ValueError as error:
            raise ValueError(f"model.path={path}: {error} (in {file})") from error
        except OSError as error:
            raise ValueError(f"model.path={path}: {file} cannot be read ({error.strerror})") from error

    # Parameters, in elements.

    @property
    def query_width(self) -> int:
        """Width of all query heads together; it may differ from `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer; the values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Matrix elements of one layer's query, key, value and output projections."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def mlp_weights(self) -> int:
        """Matrix elements of one layer's gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    @property
    def linear_weights(self) -> int:
        """Matrix elements of one layer: each is read once a step and used in one multiply-add per token."""
        return self.attention_weights + self.mlp_weights

    @property
    def layer_parameters(self) -> int:
        """Matrices, biases and norms of one layer."""
        biases = self.attention_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return self.linear_weights + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """The embedding table; the language-model head is a matrix of the same size."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a head tied to the embedding counts once."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.embedding_parameters + self.layers * self.layer_parameters + self.hidden

    # Bytes.

    @property
    def layer_bytes(self) -> int:
        return self.layer_parameters * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.embedding_parameters * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the language-model head, which a step with sampled rows reads whole, tied or not."""
        return self.embedding_parameters * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters on one device."""
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_width * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * self.kv_bytes_per_token_layer

    # FLOPs: a multiply-add is two.

    @property
    def linear_flops(self) -> int:
        """FLOPs of one token in one layer's matrices."""
        return 2 * self.linear_weights

    @property
    def attention_flops(self) -> int:
        """FLOPs of one (query, key) pair in one layer: a dot product and a weighted sum in every head."""
        return 4 * self.query_width

    @property
    def head_flops(self) -> int:
        """FLOPs of one sampled row in the language-model head."""
        return 2 * self.embedding_parameters


def shipped() -> tuple[str, ...]:
    """Names that `ModelShape.read` knows without a path."""
    names = (file.name for file in files("playground").joinpath("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def _find(path: str | Path) -> Traversable:
    place = Path(path)
    if place.is_dir():
        return _existing(place / "config.json", path)
    if place.is_file():
        return place
    if str(path) in shipped():
        return files("playground").joinpath("models", f"{path}.json")
    raise ValueError(
        f"model.path={path}: no such folder, file or model; give a checkpoint's folder, its config.json or one of "
        + ", ".join(shipped())
    )


def _existing(file: Path, path: str | Path) -> Path:
    if file.is_file():
        return file
    raise ValueError(f"model.path={path}: the folder has no config.json; give a Hugging Face checkpoint's folder")


def _parse(content: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("not a text; give a checkpoint's folder or its config.json") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    return config


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name in _ARCHITECTURES:
        return str(name)
    raise ValueError(f"architectures={name} is not supported; supported: {', '.join(_ARCHITECTURES)}")


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"field {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"field {field}={value!r} must be an integer of at least 1")
    return value


def _head_dim(architecture: str, hidden: int, heads: int) -> int:
    """Where a config does not say. Qwen3's class has a number of its own."""
    return 128 if architecture == "Qwen3ForCausalLM" else hidden // heads


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    """`dtype` since transformers 5, `torch_dtype` before; without either the weights are float32, as there."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name in DTYPE_BYTES:
        return DTYPE_BYTES[name]
    raise ValueError(f"dtype={name} is not supported; supported: {', '.join(DTYPE_BYTES)}")


class _Features(TypedDict, total=False):
    """What architectures differ in."""

    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _llama(config: Mapping[str, Any]) -> _Features:
    bias = bool(config.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Mapping[str, Any]) -> _Features:
    return {}


def _qwen2(config: Mapping[str, Any]) -> _Features:
    # Qwen2 always has these three biases and no field says so.
    return {"attention_bias": True}


def _qwen3(config: Mapping[str, Any]) -> _Features:
    bias = bool(config.get("attention_bias", False))
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


# What an architecture adds to the common fields: one row each.
_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], _Features]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
