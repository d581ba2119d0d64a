"""A layer's weights as tensors with names, and back: what of them can be counted, and sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from torch import Tensor

from engine.weights import LayerWeights


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All that are in a layer's weights, or in a part of them: `.qkv.weight` for one."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is not None:
        for part in _names(type(value)):
            yield from tensors(getattr(value, part), f"{name}.{part}")


def layer_bytes(layer: LayerWeights) -> int:
    return sum(part.nbytes for _, part in tensors(layer))


def assembled(parts: Mapping[str, Tensor]) -> LayerWeights:
    """The layer that `tensors` took apart."""
    layer: LayerWeights = _assembled(LayerWeights, "", parts)
    return layer


def _assembled(kind: type, name: str, parts: Mapping[str, Tensor]) -> Any:
    """Of what has no tensors there is none."""
    if kind is Tensor:
        return parts.get(name)
    if not any(one.startswith(f"{name}.") for one in parts):
        return None
    hints = get_type_hints(kind)
    return kind(**{part: _assembled(_present(hints[part]), f"{name}.{part}", parts) for part in _names(kind)})


def _names(kind: Any) -> tuple[str, ...]:
    return kind._fields if issubclass(kind, tuple) else tuple(field.name for field in fields(kind))


def _present(hint: Any) -> type:
    """Without `| None`."""
    return next((one for one in get_args(hint) if one is not type(None)), hint)
