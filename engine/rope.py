"""Frequencies of the rotary embedding, as the papers and the Hugging Face classes define them.

Sources: RoPE (Su et al. 2021), linear position interpolation (Chen et al. 2023), YaRN (Peng et al. 2023),
Llama 3.1's piecewise scaling (Meta 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor

from engine.config import Rope


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Radians per position of each pair, [width / 2] in float32, and the factor on cos and sin."""
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width)
    match rope.kind:
        case "linear":
            return plain / rope.parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope.parameters), 1.0
        case "yarn":
            return _yarn(plain, rope), _yarn_scale(rope.parameters)
        case _:
            return plain, 1.0


def score_scale(rope: Rope) -> float:
    """What latent attention's scores are multiplied by where rotation is stretched (DeepSeek's `mscale_all_dim`)."""
    whole = rope.parameters.get("mscale_all_dim")
    return _grow(whole, rope.parameters["factor"]) ** 2 if whole and rope.kind != "default" else 1.0


def _llama3(plain: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, between them it blends."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / parameters["factor"] * (1 - kept)


def _yarn(plain: Tensor, rope: Rope) -> Tensor:
    """Pairs that turn often stay, those that turn rarely are stretched, with a linear ramp over pairs between them."""
    parameters, width = rope.parameters, rope.width

    def pair(turns: float) -> float:
        """The pair that makes so many turns over the original length."""
        length = parameters["original_max_position_embeddings"]
        return width * log(length / (turns * 2 * pi)) / (2 * log(rope.theta))

    first, last = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (last - first) or 0.001
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - first) / ramp).clamp(0, 1)
    return plain / parameters["factor"] * stretched + plain * (1 - stretched)


def _yarn_scale(parameters: Mapping[str, Any]) -> float:
    """The attention temperature of YaRN's section 3.4, on cos and sin."""
    if (stated := parameters.get("attention_factor")) is not None:
        return float(stated)
    part, whole, factor = parameters.get("mscale"), parameters.get("mscale_all_dim"), parameters["factor"]
    return _grow(part, factor) / _grow(whole, factor) if part and whole else _grow(1.0, factor)


def _grow(weight: float, factor: float) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0
