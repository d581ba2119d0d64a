"""The cost model of operator profiles: kernels as they were timed one by one, everything else from the sheet.

It reads bundles of LLMServingSim's profiler (vLLM 0.19, one transformer layer, launched eagerly, tensor parallelism
emulated on one device): `tpN/{dense,per_sequence,attention}.csv`, `moe.csv` for mixtures of experts, `skew.csv` where
batches of unlike lengths were timed. No profile holds a collective, so links, launches and copies are the roofline's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from playground.model import ModelShape
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.roofline import Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import (
    Bounds,
    Curve,
    Grid,
    by_name,
    existing,
    find,
    numbers,
    required,
    rows,
    shipped,
    whole_grid,
)
from playground.sim.device import Device

MICROSECOND = 1e-6
Points = dict[tuple[float, ...], float]
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""How often one layer runs an operator of `dense.csv`; `qk_norm` is both norms together (the profiler's catalogue)."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Seconds of one layer's attention, over (chunk, its history, decodes, their mean context), in tokens and rows.

    The profile times one chunk beside equal decodes. Chunks of several prompts count as so many like ones: with T
    tokens and P (query, key) pairs together, one chunk of T tokens after P/T - (T+1)/2; where that is negative, T/c
    chunks of c = 2P/T - 1 tokens, each adding what one adds. Decodes of unlike length: t(mean) + skew (t(longest) -
    t(mean)). Decodes beyond those timed beside a chunk add what they add alone.
    """

    decode: Grid
    """(decodes, context)"""
    prefill: Grid
    """(chunk, history)"""
    mixed: Grid
    """(chunk, history, decodes, context), with the decodes alone at chunk 0"""
    skew: float
    bounds: Bounds

    @classmethod
    def read(cls, file: Path, skew: float, bounds: Bounds) -> Attention:
        table = numbers(file).tolist()
        decode = whole_grid({(n, kv): t * MICROSECOND for c, _, n, kv, t in table if n and not c})
        prefill = whole_grid({(c, kv): t * MICROSECOND for c, kv, n, _, t in table if c and not n})
        beside = whole_grid({(c, h, n, kv): t for c, h, n, kv, t in table if c and n})
        chunks, histories, rows, contexts = beside.axes
        alone: Points = {
            (0.0, history, row, context): decode.at(row, context)
            for history in histories
            for row in rows
            for context in contexts
        }
        joint: Points = {
            (c, h, n, kv): t * MICROSECOND
            for c, h, n, kv, t in table
            if c in chunks and h in histories and n in rows and kv in contexts
        }
        return cls(decode, prefill, whole_grid(alone | joint), skew, bounds)

    def seconds(self, shape: Shape) -> float:
        prefill = shape.prefill_tokens
        if not shape.decodes:
            return self._chunks(shape, 0, 0.0)
        mean = shape.decode_context / shape.decodes
        time = self._chunks(shape, shape.decodes, mean) if prefill else self._decodes(shape.decodes, mean)
        if shape.decode_longest > mean and self.skew:
            time += self.skew * (
                self._decodes(shape.decodes, shape.decode_longest) - self._decodes(shape.decodes, mean)
            )
        return time

    def _decodes(self, rows: int, context: float) -> float:
        self.bounds.check("decodes", rows, self.decode.axes[0][-1])
        self.bounds.check("decode_context", context, self.decode.axes[1][-1])
        return self.decode.at(rows, context)

    def _chunks(self, shape: Shape, rows: int, context: float) -> float:
        tokens, pairs = shape.prefill_tokens, shape.prefill_pairs
        history = pairs / tokens - (tokens + 1) / 2
        if history >= 0 or len(shape.chunks) == 1:
            return self._chunk(tokens, max(history, 0.0), rows, context)
        like = max(2 * pairs / tokens - 1, 1.0)
        alone = self._decodes(rows, context) if rows else self.prefill.at(0, 0)
        return alone + tokens / like * (self._chunk(like, 0.0, rows, context) - alone)

    def _chunk(self, tokens: float, history: float, rows: int, context: float) -> float:
        check = self.bounds.check
        check("prefill_tokens", tokens, self.prefill.axes[0][-1])
        check("prefill_history", history, self.prefill.axes[1][-1])
        if not rows:
            return self.prefill.at(tokens, history)
        check("decode_context", context, self.mixed.axes[3][-1])
        timed = int(self.mixed.axes[2][-1])
        if rows <= timed:
            return self.mixed.at(tokens, history, rows, context)
        more = self._decodes(rows, context) - self._decodes(timed, context)
        return self.mixed.at(tokens, history, timed, context) + more


@dataclass(frozen=True, slots=True)
class Operators:
    """Seconds of everything but attention, by tokens or sampled rows."""

    layer: Curve
    """Of one layer, per tokens."""
    first: Curve
    """The embedding."""
    last: Curve
    """The final norm."""
    head: Curve
    """Language-model head and sampler, per sampled rows."""

    @classmethod
    def read(cls, folder: Path) -> Operators:
        dense = {name: Curve(*table).scaled(MICROSECOND) for name, table in by_name(required(folder, "dense")).items()}
        rows = {name: Curve(*table) for name, table in by_name(required(folder, "per_sequence")).items()}
        if unknown := sorted({*dense} - {*PER_LAYER, "embedding", "final_layernorm"}):
            raise ValueError(f"cost.path={folder}: dense.csv has operators that no layer is known to run: {unknown}")
        layer = _total([dense[name].scaled(PER_LAYER[name]) for name in dense if name in PER_LAYER])
        if experts := existing(folder, "moe"):
            layer = layer + _experts(experts)
        elif "down_proj" not in dense:
            raise ValueError(f"cost.path={folder}: neither down_proj in dense.csv nor moe.csv: half a layer is missing")
        return cls(layer, dense["embedding"], dense["final_layernorm"], _total([*rows.values()]).scaled(MICROSECOND))


def _total(curves: Sequence[Curve]) -> Curve:
    total, *more = curves
    for curve in more:
        total = total + curve
    return total


def _experts(file: Path) -> Curve:
    """Seconds of one layer's experts by tokens, routed evenly: E (1 - (1 - k/E)^n) of E experts are then busy.

    The number of experts is the largest in the table, k what one token activates.
    """
    by_tokens: dict[float, tuple[list[float], list[float]]] = {}
    for tokens, busy, time in numbers(file).tolist():
        counts, times = by_tokens.setdefault(tokens, ([], []))
        counts.append(busy)
        times.append(time * MICROSECOND)
    each = min(by_tokens[min(by_tokens)][0])
    experts = max(max(counts) for counts, _ in by_tokens.values())
    times = [
        float(np.interp(experts * (1 - (1 - each / experts) ** tokens), *table)) for tokens, table in by_tokens.items()
    ]
    return Curve([*by_tokens], times)


def measured_skew(file: Path) -> float:
    """The share a of t = t(mean) + a (t(longest) - t(mean)) that fits all pure decode batches best (least squares)."""
    names = "t_mean_us", "t_max_us", "t_skew_us"
    pure = np.asarray([[float(row[name]) for name in names] for row in rows(file) if row["regime"] == "pure"])
    mean, longest, skewed = pure.T
    return float(np.clip((skewed - mean) @ (longest - mean) / ((longest - mean) @ (longest - mean)), 0, 1))


@dataclass(frozen=True, slots=True)
class Profiled:
    """Kernels from the profile at `path` (a folder with `tpN` in it, or a shipped name; null: the shipped one of this
    model on this device), everything else from the sheet.

    What no profile says is the roofline's: collectives, launches, transfers, copies, host times, and the demands on
    compute and memory that say what a kernel leaves to others, which are cut to the measured time. A step beyond the
    tables is an error unless `extrapolate`. `skew`: as measured in the bundle's skew.csv unless given; 0 without it.
    """

    model: ModelShape
    device: Device
    tp: int = 1
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    path: str | None = None
    extrapolate: bool = False
    skew: float | None = None
    graph_rows: int = 256
    host_base: float = 2e-4
    host_per_sequence: float = 3e-6
    _sheet: Roofline = field(init=False, repr=False, compare=False)
    _operators: Operators = field(init=False, repr=False, compare=False)
    _attention: Attention = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.skew is not None and not 0 <= self.skew <= 1:
            raise ValueError(f"cost.skew={self.skew} must lie in 0..1")
        path = self.path or _matching(self.model, self.device)
        folder = _degree(find(path), self.tp)
        bounds = Bounds(path, self.extrapolate)
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "_sheet", self._roofline())
        keep(self, "_operators", Operators.read(folder))
        keep(self, "_attention", Attention.read(required(folder, "attention"), self._skew(folder), bounds))

    def _roofline(self) -> Roofline:
        return Roofline(
            model=self.model,
            device=self.device,
            tp=self.tp,
            stages=self.stages,
            layers=self.layers,
            block_size=self.block_size,
            graph_rows=self.graph_rows,
            host_base=self.host_base,
            host_per_sequence=self.host_per_sequence,
        )

    def _skew(self, folder: Path) -> float:
        if self.skew is not None:
            return self.skew
        file = existing(folder, "skew")
        return measured_skew(file) if file else 0.0

    def stage(self, shape: Shape, stage: int) -> Cost:
        if not shape.tokens:
            return IDLE
        sheet = self._sheet.stage(shape, stage)
        kernels = self._kernels(shape, stage)
        return sheet._replace(compute=min(sheet.compute, kernels), memory=min(sheet.memory, kernels), kernels=kernels)

    def _kernels(self, shape: Shape, stage: int) -> float:
        operators, tokens = self._operators, shape.tokens
        self._attention.bounds.check("tokens", tokens, operators.layer.most)
        layers = self._sheet.layers
        assert layers is not None  # the roofline has told
        time = layers[stage] * (operators.layer.at(tokens) + self._attention.seconds(shape))
        if stage == 0:
            time += operators.first.at(tokens)
        if stage == len(layers) - 1 and shape.sampled:
            self._attention.bounds.check("sampled", shape.sampled, operators.head.most)
            time += operators.last.at(tokens) + operators.head.at(shape.sampled)
        return time

    def host(self, shape: Shape) -> float:
        return self._sheet.host(shape)

    def transfer(self, shape: Shape) -> float:
        return self._sheet.transfer(shape)

    def copy(self, blocks: int) -> float:
        return self._sheet.copy(blocks)


def _matching(model: ModelShape, device: Device) -> str:
    """The shipped bundle of this model, by its sizes, on this device, by its name."""
    for path in shipped():
        if (file := find(path) / "bundle.json").is_file():
            bundle = json.loads(file.read_text(encoding="utf-8"))
            if bundle["device"] == device.name and all(getattr(model, key) == n for key, n in bundle["model"].items()):
                return path
    raise ValueError(
        f"cost.path=null: no profile of this model on device={device.name} ships with the playground; give a folder, "
        f"or take a model and device of: {', '.join(path for path in shipped() if '/' in path)}"
    )


def _degree(bundle: Path, tp: int) -> Path:
    if (folder := bundle / f"tp{tp}").is_dir():
        return folder
    profiled = sorted(place.name for place in bundle.glob("tp*"))
    raise ValueError(f"tp={tp} was not profiled in cost.path={bundle}; it has {', '.join(profiled) or 'no tpN folder'}")
