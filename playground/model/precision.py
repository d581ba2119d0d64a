"""In what number formats weights are held and multiplied, and keys and values cached.

A format costs bytes and decides at which of a device's rates products run. It says nothing of accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """How a quantised matrix is stored, and what multiplies it."""

    bits: int
    group: int | None = None
    """Elements that share a scale; None: a whole row or more, which is not counted (at most 0.1 %)."""
    scale_bits: int = 0
    """Of the group's scale and zero point."""
    eight_bit: bool = False
    """Activations are quantised, too, and products run at the device's 8-bit rate; else at that of the dtype."""

    @property
    def bytes(self) -> float:
        """Of one element, with its share of the scale."""
        return (self.bits + (self.scale_bits / self.group if self.group else 0.0)) / 8


# Where each comes from: docs/cost-model.md.
FORMATS: Mapping[str, Format] = {
    "fp8": Format(8, 128 * 128, 32, eight_bit=True),
    "fp8_a16": Format(8),
    "int8": Format(8),
    "int8_a8": Format(8, eight_bit=True),
    "int4": Format(4, 128, 16 + 4),
    "nvfp4": Format(4, 16, 8),
    "mxfp4": Format(4, 32, 8),
}
KV_FORMATS: Mapping[str, int] = {"fp8": 1, "bf16": 2}
"""Bytes of one cached element. FP8 scales are one a tensor (vLLM) and not counted."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats by name; None: the model's dtype. Tables, norms, biases, router and head are always in the dtype."""

    weights: str | None = None
    """Of the matrices of attention, MLPs and shared experts."""
    experts: str | None = None
    """Of the routed experts."""
    kv: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("weights", FORMATS), ("experts", FORMATS), ("kv", KV_FORMATS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"model.{name}={value} is not supported; supported: null, {', '.join(known)}")

    def weight_bytes(self, dtype_bytes: int) -> float:
        """Of one matrix element outside the routed experts."""
        return FORMATS[self.weights].bytes if self.weights else dtype_bytes

    def expert_bytes(self, dtype_bytes: int) -> float:
        """Of one matrix element of a routed expert."""
        return FORMATS[self.experts].bytes if self.experts else dtype_bytes

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Of one cached element."""
        return KV_FORMATS[self.kv] if self.kv else dtype_bytes

    @property
    def eight_bit_weights(self) -> bool:
        return self.weights is not None and FORMATS[self.weights].eight_bit

    @property
    def eight_bit_experts(self) -> bool:
        return self.experts is not None and FORMATS[self.experts].eight_bit

    @property
    def packed_experts(self) -> bool:
        """Whether several elements share a byte, and are unpacked before they are multiplied."""
        return self.experts is not None and FORMATS[self.experts].bits < 8


def read_precision(config: Mapping[str, Any]) -> Precision:
    """What `quantization_config` says; a `ValueError` names what is not known of it."""
    stated = config.get("quantization_config")
    if not stated:
        return Precision()
    if not isinstance(stated, dict):
        raise ValueError(f"quantization_config={stated!r} must be an object")
    name = _format(stated)
    kv = "fp8" if stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo") == "FP8" else None
    kept = stated.get("modules_to_not_convert") or stated.get("ignore") or []
    attention_kept = any(module in ("self_attn", "model.layers.*.self_attn") for module in kept)
    # DeepSeek-V4 states its experts' format apart.
    small = "fp4" in (stated.get("expert_dtype"), config.get("expert_dtype"))
    return Precision(None if attention_kept else name, "mxfp4" if small else name, kv)


def _format(stated: Mapping[str, Any]) -> str:
    method = str(stated.get("quant_method", "")).lower()
    if method in ("awq", "gptq"):
        return _integer(method, stated.get("bits"))
    if method == "compressed-tensors":
        return _compressed(stated)
    name = _METHODS.get(method) or _ALGORITHMS.get(str(stated.get("quant_algo", "")).upper())
    if name is None:
        raise ValueError(
            f"quantization_config.quant_method={method or None} is not supported; supported: "
            f"awq, gptq, compressed-tensors, {', '.join(_METHODS)}, modelopt ({', '.join(_ALGORITHMS)})"
        )
    return name


def _integer(method: str, bits: Any) -> str:
    if bits in (4, 8):
        return f"int{bits}"
    raise ValueError(f"quantization_config.bits={bits} is not supported with {method}; supported: 4, 8")


def _compressed(stated: Mapping[str, Any]) -> str:
    """Formats of compressed-tensors: bits and type of the weights, and whether activations are quantised, too."""
    groups = stated.get("config_groups") or {}
    first = next(iter(groups.values()), None)
    weights = (first or {}).get("weights") or {}
    kind = (weights.get("type"), weights.get("num_bits"), bool(first and first.get("input_activations")))
    if kind not in _COMPRESSED:
        raise ValueError(
            f"quantization_config: weights of type={kind[0]} num_bits={kind[1]} are not supported; supported: "
            "int of 4 or 8 bits, float of 4 or 8 bits"
        )
    return _COMPRESSED[kind]


_METHODS: Mapping[str, str] = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
_ALGORITHMS: Mapping[str, str] = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4"}
_COMPRESSED: Mapping[tuple[Any, Any, bool], str] = {
    ("int", 4, False): "int4",
    ("int", 8, False): "int8",
    ("int", 8, True): "int8_a8",
    ("float", 8, False): "fp8_a16",
    ("float", 8, True): "fp8",
    ("float", 4, False): "nvfp4",
    ("float", 4, True): "nvfp4",
}
