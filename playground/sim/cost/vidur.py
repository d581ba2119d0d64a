"""The cost model of a peer: Vidur's operator tables, put together by Vidur's own formula.

Source: microsoft/vidur 7d47513, `sklearn_execution_time_predictor.py`; re-derived, and equal to what it computed for
10,691 iterations (python -m experiments.peers.vidur). It knows no embedding, head, sampling or host time, since Vidur
does not charge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

import numpy as np

from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Array, Bounds, columns, find, numbers, required
from playground.sim.device import Device

MILLISECOND = 1e-3
ROUNDED = (
    "add",
    "attn_post_proj",
    "attn_pre_proj",
    "attn_rope",
    "input_layernorm",
    "mlp_act",
    "mlp_down_proj",
    "mlp_up_proj",
    "post_attention_layernorm",
)
"""Operators that are looked up at the tokens rounded up to `TOKENS`."""
TOKENS = 8
KEYS = 64
"""Cached keys are rounded up to so many."""
REDUCE_LAUNCH_MS = 0.02
"""Added to each of a layer's two all-reduces."""
SEVERAL = 1.1
"""Attention of more than one decode, or of more than one chunk, takes this much longer (grouped-query models)."""


@dataclass(frozen=True, slots=True)
class Vidur:
    """Milliseconds per layer in the folder `path` (or a shipped name): `per_token_ops_ms_per_layer.csv`,
    `attn_decode.csv` over (batch, keys), `attn_prefill.csv` over (keys, sqrt of the chunks' squares summed).

    Tables are of one model, device and `tp`: `model` gives layers, `device` the links between stages and to the host.
    A step beyond the tables is an error, as it is in Vidur. All of a kernel's time counts as compute and as memory.
    """

    model: ModelShape
    device: Device
    tp: int = 2
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    path: str = "codellama-34b_a100_tp2"
    _bounds: Bounds = field(init=False, repr=False, compare=False)
    _layers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _layer: list[float] = field(init=False, repr=False, compare=False)
    """Seconds of one layer's operators but attention, all-reduces apart, by tokens."""
    _reduce: list[float] = field(init=False, repr=False, compare=False)
    _decode: Array = field(init=False, repr=False, compare=False)
    """[batch - 1, keys / 64] seconds of one layer."""
    _prefill: Array = field(init=False, repr=False, compare=False)
    """[keys / 64, chunk - 1] seconds of one layer."""
    _per_token: float = field(init=False, repr=False, compare=False)
    _per_block: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        folder = find(self.path)
        layout = Layout.of(self.model, self.tp, self.stages, self.layers)
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "_bounds", Bounds(self.path, extrapolate=False))
        keep(self, "_layers", layout.layers)
        layer, reduce = _operators(required(folder, "per_token_ops_ms_per_layer"))
        keep(self, "_layer", layer)
        keep(self, "_reduce", reduce)
        keep(self, "_decode", _attention(required(folder, "attn_decode")))
        keep(self, "_prefill", _attention(required(folder, "attn_prefill")))
        keep(self, "_per_token", self.model.hidden * self.model.dtype_bytes / self.device.link)
        largest = max(layout.kv_bytes_per_token(stage) for stage in range(layout.stages))
        keep(self, "_per_block", self.block_size * largest / self.device.host_link)

    def stage(self, shape: Shape, stage: int) -> Cost:
        if not shape.tokens:
            return IDLE
        layers = self._layers[stage]
        self._bounds.check("tokens", shape.tokens, len(self._layer) - 1)
        kernels = layers * (self._layer[shape.tokens] + self._decodes(shape) + self._chunks(shape))
        return Cost(kernels, kernels, kernels, layers * self._reduce[shape.tokens], 0.0)

    def _decodes(self, shape: Shape) -> float:
        rows = shape.decodes
        if not rows:
            return 0.0
        keys = -(-(shape.decode_context // rows) // KEYS)
        self._bounds.check("decodes", rows, len(self._decode))
        self._bounds.check("decode_context", keys * KEYS, (self._decode.shape[1] - 1) * KEYS)
        return float(self._decode[rows - 1, keys]) * (SEVERAL if rows > 1 else 1.0)

    def _chunks(self, shape: Shape) -> float:
        chunks = shape.chunks
        if not chunks:
            return 0.0
        keys = sum(-(-history // KEYS) for history, _ in chunks)
        width = round(sqrt(sum(tokens**2 for _, tokens in chunks)))
        self._bounds.check("prefill_history", keys * KEYS, (len(self._prefill) - 1) * KEYS)
        self._bounds.check("prefill_tokens", width, self._prefill.shape[1])
        return float(self._prefill[keys, width - 1]) * (SEVERAL if len(chunks) > 1 else 1.0)

    def host(self, shape: Shape) -> float:
        """Vidur charges none unless it is given CPU profiles, which it no longer ships."""
        return 0.0

    def transfer(self, shape: Shape) -> float:
        """From the sheet: its send-receive table is not among these."""
        return self.device.link_latency + self._per_token * shape.tokens

    def copy(self, blocks: int) -> float:
        """From the sheet: Vidur does not swap."""
        return self.device.host_latency + self._per_block * blocks if blocks else 0.0


def _operators(file: Path) -> tuple[list[float], list[float]]:
    """Seconds by tokens, from 0: operators but attention, and both all-reduces."""
    table = dict(zip(columns(file), numbers(file).T, strict=True))
    tokens = table["num_tokens"].astype(int)
    if not np.array_equal(tokens, np.arange(1, len(tokens) + 1)):
        raise ValueError(f"cost.path={file}: num_tokens must run from 1 without a gap")
    rounded = np.minimum(-(-tokens // TOKENS) * TOKENS, len(tokens)) - 1
    layer = sum(table[name][rounded] for name in ROUNDED) + table["attn_kv_cache_save"]
    reduce = 2 * (table["all_reduce"][rounded] + REDUCE_LAUNCH_MS)
    return [0.0, *(layer * MILLISECOND).tolist()], [0.0, *(reduce * MILLISECOND).tolist()]


def _attention(file: Path) -> Array:
    """Seconds over (first column, second column), which must make up a full grid in order."""
    first, second, time = numbers(file).T
    rows, width = len(np.unique(first)), len(np.unique(second))
    if len(time) != rows * width or (np.diff(first) < 0).any():
        raise ValueError(f"cost.path={file}: its rows must be a full grid, sorted by the first column, then the second")
    return np.asarray(time * MILLISECOND).reshape(rows, width)
