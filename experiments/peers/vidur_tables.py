"""Vidur's prediction tables, filled from a cost model of ours, so that both simulate steps of about the same length.

Vidur adds up one number per operator and layer, looked up by tokens, or by batch and cached keys; ours is a maximum of
compute and memory over the whole step. What is written is the step time of decodes alone and of one chunk alone, less
that of as many tokens without keys. Format: one `OPERATOR.csv.xz` per operator with columns X_0, X_1, prediction, as
Vidur 0.0.26 stores what it predicted.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path

from playground.sim.cost.model import CostModel
from playground.sim.cost.shape import Shape

GROUPED = 1.1
"""Vidur multiplies the attention of more than one decode by this (grouped-query models)."""
TOKENS, CHUNK, KEYS = 8, 32, 256
"""Steps of its tables: tokens of a batch, tokens of a chunk, cached keys."""
NOTHING = (
    "attn_rope",
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
"""Operators that `mlp_up_proj` stands for: they are looked up all the same."""

Table = Mapping[tuple[int, ...], float]


def write(folder: Path, cost: CostModel, layers: int, seqs: int, tokens: int, keys: int) -> None:
    """Tables up to so many sequences and tokens a step and keys a sequence, as Vidur's loader finds them."""
    (folder / "network").mkdir(parents=True)
    (folder / "compute").mkdir()
    for operator, table in _tables(cost, layers, seqs, tokens, keys).items():
        _write(folder / "compute" / f"{operator}.csv.xz", table)


def _tables(cost: CostModel, layers: int, seqs: int, tokens: int, keys: int) -> dict[str, Table]:
    """Milliseconds per layer by operator."""
    ms = 1e3 / layers
    # Decodes go in however many there are: a batch may exceed the budget by nothing but the rounding.
    batches = range(TOKENS, max(tokens, seqs) + TOKENS + 1, TOKENS)
    dense: Table = {(n,): ms * _bare(cost, n) for n in batches}
    decode: Table = {
        (b, k): ms * (_decodes(cost, b, k) - _bare(cost, b)) / (GROUPED if b > 1 else 1)
        for b in range(1, seqs + 1)
        for k in range(KEYS, keys + KEYS, KEYS)
    }
    prefill: Table = {
        (k, n): ms * (_chunk(cost, k, n) - _bare(cost, n))
        for n in range(CHUNK, tokens + CHUNK, CHUNK)
        for k in range(KEYS, keys + KEYS, KEYS)
    }
    nothing: Table = dict.fromkeys(dense, 0.0)
    saved: Table = dict.fromkeys(((n,) for n in range(1, max(tokens, seqs) + 1)), 0.0)
    looked_at = {"mlp_up_proj": dense, "attn_decode": decode, "attn_prefill": prefill}
    return looked_at | dict.fromkeys(NOTHING, nothing) | {"attn_kv_cache_save": saved}


def _bare(cost: CostModel, tokens: int) -> float:
    """Seconds of one sequence's tokens that look at no keys: what rows and sampling cost beyond it goes to decodes."""
    return _seconds(cost, Shape(tokens, 1, 1, 0, 0, 0, 0, 0))


def _decodes(cost: CostModel, batch: int, keys: int) -> float:
    return _seconds(cost, Shape(batch, batch, batch, batch, batch * keys, keys, 0, 0))


def _chunk(cost: CostModel, keys: int, tokens: int) -> float:
    """A chunk whose last token sees so many keys, its own included."""
    before = max(0, keys - tokens)
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return _seconds(cost, Shape(tokens, 1, 1, 0, 0, 0, pairs, before + tokens, ((before, tokens),)))


def _seconds(cost: CostModel, shape: Shape) -> float:
    return cost.stage(shape, 0).device_time + cost.host(shape)


def _write(file: Path, table: Table) -> None:
    columns = [f"X_{i}" for i in range(len(next(iter(table))))]
    with lzma.open(file, "wt", newline="", encoding="ascii") as text:
        rows = csv.writer(text)
        rows.writerow([*columns, "prediction"])
        rows.writerows(_rows(table))


def _rows(table: Table) -> Iterable[tuple[float, ...]]:
    return ((*key, max(0.0, value)) for key, value in table.items())
