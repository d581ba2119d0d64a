"""How many parameters stand beside a multimodal decoder: they take memory, a step of text tokens never reads them.

What an image costs to encode is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def clip(config: Mapping[str, Any], hidden: int) -> int:
    """CLIP's vision tower and LLaVA's two-layer projector to the decoder's `hidden` (transformers' `llava`)."""
    own = config.get("vision_config") or {}
    width, inner = int(own.get("hidden_size", 1024)), int(own.get("intermediate_size", 4096))
    patch, image = int(own.get("patch_size", 14)), int(own.get("image_size", 336))
    embeddings = width + 3 * patch**2 * width + ((image // patch) ** 2 + 1) * width
    layer = 4 * (width**2 + width) + 2 * width * inner + inner + width + 4 * width
    tower = embeddings + int(own.get("num_hidden_layers", 24)) * layer + 4 * width
    return tower + (width + 1) * hidden + (hidden + 1) * hidden


def qwen3_vl(config: Mapping[str, Any], hidden: int) -> int:
    """Qwen3-VL's tower, its merger, and one merger more for each layer that feeds the decoder (`qwen3_vl`)."""
    own = config.get("vision_config") or {}
    width, merged = _qwen_widths(own)
    feeding = own.get("deepstack_visual_indexes", (8, 16, 24))
    embeddings = _patches(own, width) + width + int(own.get("num_position_embeddings", 2304)) * width
    inner = int(own.get("intermediate_size", 4304))
    block = 4 * width + 4 * (width**2 + width) + 2 * width * inner + inner + width
    merger = (merged + 1) * merged + (merged + 1) * hidden
    mergers = 2 * width + merger + len(feeding) * (2 * merged + merger)
    return embeddings + int(own.get("depth", 27)) * block + mergers


def qwen25_vl(config: Mapping[str, Any], hidden: int) -> int:
    """Qwen2.5-VL's tower of gated MLPs and its merger (`qwen2_5_vl`)."""
    own = config.get("vision_config") or {}
    width, merged = _qwen_widths(own, 1280)
    inner = int(own.get("intermediate_size", 3420))
    block = 2 * width + 4 * (width**2 + width) + 3 * width * inner + 2 * inner + width
    merger = width + (merged + 1) * merged + (merged + 1) * hidden
    return _patches(own, width) + int(own.get("depth", 32)) * block + merger


def _qwen_widths(own: Mapping[str, Any], default: int = 1152) -> tuple[int, int]:
    """Of one patch, and of the patches that are merged into one token."""
    width = int(own.get("hidden_size", default))
    return width, width * int(own.get("spatial_merge_size", 2)) ** 2


def _patches(own: Mapping[str, Any], width: int) -> int:
    channels = int(own.get("in_channels", own.get("in_chans", 3)))
    patch = int(own.get("patch_size", 14 if "window_size" in own else 16))
    return channels * int(own.get("temporal_patch_size", 2)) * patch**2 * width
