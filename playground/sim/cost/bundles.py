"""Operator profiles of LLMServingSim's profiler, read: vLLM 0.19, one transformer layer, launched eagerly, tensor
parallelism emulated on one device.

A bundle holds `tpN/{dense,per_sequence,attention}.csv`, `moe.csv` for mixtures of experts, and `skew.csv` where batches
of unlike lengths were timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from playground.sim.capacity import Layout
from playground.sim.cost.operators import Measured, Operators, total
from playground.sim.cost.routing import Loads, uniform
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Bounds, Curve, Grid, by_name, existing, numbers, required, rows, whole_grid

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


def read(bundle: Path, layout: Layout, skew: float | None, bounds: Bounds) -> Measured:
    """What a bundle says of a model that is cut so. `ValueError` says what was not profiled."""
    folder = _degree(bundle, layout.tp)
    operators = read_operators(folder, layout)
    if skew is None:
        file = existing(folder, "skew")
        skew = measured_skew(file) if file else 0.0
    return Measured(operators, {None: Attention.read(required(folder, "attention"), skew, bounds)}, bounds)


def read_operators(folder: Path, layout: Layout | None = None) -> Operators:
    """Of a `tpN` folder; without a layout experts are those that the folder's ranks hold."""
    dense = {name: Curve(*table).scaled(MICROSECOND) for name, table in by_name(required(folder, "dense")).items()}
    rows = {name: Curve(*table) for name, table in by_name(required(folder, "per_sequence")).items()}
    if unknown := sorted({*dense} - {*PER_LAYER, "embedding", "final_layernorm"}):
        raise ValueError(f"cost.path={folder}: dense.csv has operators that no layer is known to run: {unknown}")
    layer = total([dense[name].scaled(PER_LAYER[name]) for name in dense if name in PER_LAYER])
    experts = _experts(folder, layout)
    if experts is None and "down_proj" not in dense:
        raise ValueError(f"cost.path={folder}: neither down_proj in dense.csv nor moe.csv: half a layer is missing")
    head = total([*rows.values()]).scaled(MICROSECOND)
    ends = dense["embedding"], dense["final_layernorm"], head
    if experts is None:
        return Operators(layer, None, None, *ends)
    return Operators(None, layer, experts, *ends)


def _experts(folder: Path, layout: Layout | None) -> Curve | None:
    """Seconds of one layer's experts on one rank, by the tokens of all ranks that share them, routed evenly.

    Experts that are cut over N ranks were timed in `tpN`, wherever attention was.
    """
    place = folder if layout is None else folder.parent / f"tp{layout.expert_slices}"
    if (file := existing(place, "moe")) is None:
        if layout and existing(folder, "moe"):
            raise ValueError(
                f"cost.path={folder.parent}: experts cut over {layout.expert_slices} ranks were not profiled (no "
                f"{place.name}/moe.csv): set parallel.ep so that ranks hold whole ones, or take backend/cost=roofline"
            )
        return None
    by_tokens: dict[float, tuple[list[float], list[float]]] = {}
    for tokens, busy, time in numbers(file).tolist():
        counts, times = by_tokens.setdefault(tokens, ([], []))
        counts.append(busy)
        times.append(time * MICROSECOND)
    return _whole(by_tokens) if layout is None or layout.ep == 1 else _share(by_tokens, layout)


TimesByTokens = dict[float, tuple[list[float], list[float]]]
"""{tokens: (experts that get any, seconds)}"""


def _whole(by_tokens: TimesByTokens) -> Curve:
    """Of a rank that has all experts: E (1 - (1 - k/E)^n) of E are busy, E being the largest number in the table and k
    what a lone token activates."""
    each = min(by_tokens[min(by_tokens)][0])
    experts = max(max(counts) for counts, _ in by_tokens.values())
    times = [
        float(np.interp(experts * (1 - (1 - each / experts) ** tokens), *table)) for tokens, table in by_tokens.items()
    ]
    return Curve([*by_tokens], times)


def _share(by_tokens: TimesByTokens, layout: Layout) -> Curve:
    """Of the busiest rank of several: what all experts take on as many (token, expert) pairs of as many of them."""
    experts = layout.model.experts
    assert experts is not None  # or `Layout` would have refused `ep`
    loads, known = Loads(uniform(experts), layout.ep), sorted(by_tokens)
    times: dict[int, float] = {}
    for count in sorted({int(tokens) * many for tokens in known for many in (1, layout.ep)}):
        rows, busy = loads.of(count)
        if rows <= known[-1] * experts.active:
            at_known = [float(np.interp(busy, *by_tokens[tokens])) for tokens in known]
            times[count] = float(np.interp(rows / experts.active, known, at_known))
    return Curve([*times], [*times.values()])


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


def measured_skew(file: Path) -> float:
    """The share a of t = t(mean) + a (t(longest) - t(mean)) that fits all pure decode batches best (least squares)."""
    names = "t_mean_us", "t_max_us", "t_skew_us"
    pure = np.asarray([[float(row[name]) for name in names] for row in rows(file) if row["regime"] == "pure"])
    mean, longest, skewed = pure.T
    return float(np.clip((skewed - mean) @ (longest - mean) / ((longest - mean) @ (longest - mean)), 0, 1))


def _degree(bundle: Path, tp: int) -> Path:
    if (folder := bundle / f"tp{tp}").is_dir():
        return folder
    profiled = sorted(place.name for place in bundle.glob("tp*"))
    raise ValueError(f"tp={tp} was not profiled in cost.path={bundle}; it has {', '.join(profiled) or 'no tpN folder'}")
