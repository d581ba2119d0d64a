"""AIConfigurator's kernel tables, read and cut to a model: products, attention, experts, sums over devices.

A system's folder holds `gemm`, `attention`, `moe` and `comm`, below each a framework and a version with Parquet files
of milliseconds (ai-dynamo/aiconfigurator, `systems/data`). The newest version counts, and of several kernels for the
same work the fastest. Element-wise kernels are in none of them: they take the time of their bytes, and a constant each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost.operators import Attention, Measured, Operators, total
from playground.sim.cost.roofline import activation_bytes
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Array, Bounds, Curve, Grid
from playground.sim.device import Device

MILLISECOND = 1e-3
ELEMENTWISE = 3e-6
"""Seconds of an element-wise kernel beyond its bytes: `mem_empirical_constant_latency` of AIConfigurator's systems."""
PER_LAYER = 3
"""Element-wise kernels of a layer: two norms with their residuals, and a gate."""
Table = Mapping[str, NDArray[Any]]
Points = Mapping[tuple[float, ...], float]
"""{place on the axes: seconds}"""

_PRODUCTS = {None: "bfloat16", "fp8": "fp8_block"}
_EXPERTS = {None: "bfloat16", "fp8": "fp8_block", "mxfp4": "w4a16_mxfp4", "int4": "int4_wo"}
_KV = {None: "bfloat16", "bf16": "bfloat16", "fp8": "fp8"}


def found(folder: Path) -> bool:
    """Whether these are such tables."""
    return (folder / "gemm").is_dir() and (folder / "attention").is_dir()


def read(folder: Path, layout: Layout, device: Device, skew: float, bounds: Bounds) -> Measured:
    """What the tables say of a model that is cut so. `ValueError` says what is not in them."""
    model = layout.model
    if model.latent or model.compressed:
        raise ValueError(
            f"cost.path={folder}: {model.architecture} has attention that these tables do not hold; "
            "take backend/cost=roofline"
        )
    table = _table(folder, "gemm/*/*/gemm_perf.parquet")
    if device.name not in str(table["device"][0]):
        raise ValueError(
            f"cost.path={folder}: measured on {table['device'][0]}, and device={device.name}; choose the same"
        )
    dtype = _format(_PRODUCTS, model.precision.weights, folder, "weights")
    products = _Products.of(table, dtype, folder)
    plain = products if dtype == "bfloat16" else _Products.of(table, "bfloat16", folder)
    experts = layout.model.expert_layers
    own = total(_projections(layout, products))
    nothing = Curve([own.most], [0.0])
    operators = Operators(
        layer=own + total(_mlp(layout, products, model.intermediate)) + _elementwise(layout, device, own.most, False)
        if experts < model.layers
        else None,
        sparse=own + _beside_experts(layout, products, plain) + _elementwise(layout, device, own.most, True)
        if experts
        else None,
        routed=_routed(folder, layout) if experts else None,
        first=nothing,
        last=nothing,
        head=plain.curve(model.vocabulary // layout.tp, model.hidden) + _sampler(model, device, own.most),
    )
    return Measured(operators, _attention(folder, layout, skew, bounds), bounds, _reduce(folder, layout))


def _format(names: Mapping[str | None, str], own: str | None, folder: Path, what: str) -> str:
    if own in names:
        return names[own]
    known = ", ".join(str(name or "null") for name in names)
    raise ValueError(f"cost.path={folder}: model.{what}={own} is not in these tables; they have {known}")


def _table(folder: Path, pattern: str) -> Table:
    """The newest version's columns."""
    # Not with the module: only who reads such tables waits for Arrow.
    import pyarrow.parquet as pq

    files = sorted(folder.glob(pattern), key=_version)
    if not files:
        raise ValueError(f"cost.path={folder}: {pattern} is missing; give a folder of AIConfigurator's kernel tables")
    table = pq.read_table(files[-1])
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _version(file: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in file.parent.name.split("."))


def _where(table: Table, **values: object) -> Table:
    """The rows that have these values."""
    rows = np.ones(len(table["latency"]), bool)
    for name, value in values.items():
        rows &= table[name] == value
    return {name: column[rows] for name, column in table.items()}


def _fastest(table: Table, *axes: str) -> dict[tuple[float, ...], float]:
    """{place on the axes: seconds}"""
    least: dict[tuple[float, ...], float] = {}
    columns = [table[axis].tolist() for axis in axes]
    for *place, time in zip(*columns, table["latency"].tolist(), strict=True):
        key = tuple(place)
        least[key] = min(time * MILLISECOND, least.get(key, np.inf))
    return least


# --- products


@dataclass(frozen=True, slots=True)
class _Products:
    """Seconds of [m, k] x [k, n], over all three."""

    rows: Array
    outputs: Array
    inputs: Array
    times: Array
    """[rows, outputs, inputs]; infinite where nothing was measured."""
    folder: Path

    @classmethod
    def of(cls, table: Table, dtype: str, folder: Path) -> _Products:
        chosen = _where(table, gemm_dtype=dtype)
        rows, outputs, inputs = (np.unique(chosen[axis]) for axis in ("m", "n", "k"))
        times = np.full((len(rows), len(outputs), len(inputs)), np.inf)
        axes = zip((rows, outputs, inputs), ("m", "n", "k"), strict=True)
        places = tuple(np.searchsorted(axis, chosen[name]) for axis, name in axes)
        np.minimum.at(times, places, chosen["latency"] * MILLISECOND)
        return cls(rows.astype(float), outputs.astype(float), inputs.astype(float), times, folder)

    def curve(self, outputs: float, inputs: float) -> Curve:
        """By rows: linear between measured widths; wider than all, in proportion."""
        widest = float(self.outputs[-1])
        n, k = _weights(self.outputs, min(outputs, widest)), _weights(self.inputs, inputs)
        seconds = sum(share * other * self.times[:, i, j] for i, share in n for j, other in k)
        assert isinstance(seconds, np.ndarray)
        if not np.isfinite(seconds).all() or inputs > self.inputs[-1]:
            raise ValueError(f"cost.path={self.folder}: products of {inputs:g} x {outputs:g} were not measured")
        return Curve(self.rows, seconds * max(outputs / widest, 1.0))


def _weights(axis: Array, value: float) -> list[tuple[int, float]]:
    """The points about a value, and how much each of them counts."""
    above = int(np.searchsorted(axis, value))
    if above == 0 or above == len(axis) or axis[above] == value:
        return [(min(above, len(axis) - 1), 1.0)]
    share = (value - axis[above - 1]) / (axis[above] - axis[above - 1])
    return [(above - 1, 1 - share), (above, share)]


def _projections(layout: Layout, products: _Products) -> list[Curve]:
    model = layout.model
    own = model.query_width // layout.tp
    kv = 2 * layout.kv_heads * model.head_dim
    return [products.curve(own + kv, model.hidden), products.curve(model.hidden, own)]


def _mlp(layout: Layout, products: _Products, width: int) -> list[Curve]:
    own = width / layout.tp
    return [products.curve(2 * own, layout.model.hidden), products.curve(layout.model.hidden, own)]


def _beside_experts(layout: Layout, products: _Products, plain: _Products) -> Curve:
    """The router, and the experts that every token goes through."""
    experts = layout.model.experts
    assert experts is not None
    shared = _mlp(layout, products, experts.shared) if experts.shared else []
    return total([plain.curve(experts.count, layout.model.hidden), *shared])


def _elementwise(layout: Layout, device: Device, most: int, experts: bool) -> Curve:
    """Of one layer, the first that has experts or has none."""
    layer = next(one for one in range(layout.model.layers) if layout.model.has_experts(one) == experts)
    start = PER_LAYER * ELEMENTWISE
    return Curve([0, most], [start, start + most * activation_bytes(layout, layer) / device.bandwidth])


def _sampler(model: ModelShape, device: Device, most: int) -> Curve:
    """Logits written, and read in float32 to sample."""
    return Curve([0, most], [0.0, most * model.vocabulary * (model.dtype_bytes + 4) / device.bandwidth])


# --- experts


def _routed(folder: Path, layout: Layout) -> Curve:
    """Of one rank, by tokens of all that share the experts; balanced routing, gathering and adding up included."""
    experts, model = layout.model.experts, layout.model
    assert experts is not None
    dtype = _format(_EXPERTS, model.precision.experts, folder, "experts")
    table = _where(_table(folder, "moe/*/*/moe_perf.parquet"), moe_dtype=dtype, distribution="balanced")
    sizes = dict(hidden_size=model.hidden, inter_size=experts.intermediate)
    own = _where(table, **sizes, topk=experts.active, num_experts=experts.count)
    cut = _where(own, moe_tp_size=layout.expert_slices, moe_ep_size=layout.ep)
    if not len(cut["latency"]):
        cuts = sorted(set(zip(own["moe_tp_size"].tolist(), own["moe_ep_size"].tolist(), strict=True)))
        has = ", ".join(f"{slices} x {ep}" for slices, ep in cuts) or f"other sizes in {dtype} only"
        raise ValueError(
            f"cost.path={folder}: experts of {model.hidden} x {experts.intermediate}, {experts.active} of "
            f"{experts.count}, sliced over {layout.expert_slices} ranks in ep={layout.ep} groups, were not measured; "
            f"measured (slices x groups): {has}"
        )
    times = _fastest(cut, "num_tokens")
    return Curve([tokens for (tokens,) in times], [*times.values()])


# --- sums over devices


def _reduce(folder: Path, layout: Layout) -> Curve | None:
    """Of hidden states in 16 bits, by tokens: vLLM's own all-reduce in a graph, or NCCL's where that is faster."""
    if layout.tp == 1:
        return None
    own = _where(_table(folder, "comm/vllm/*/custom_allreduce_perf.parquet"), backend="vllm_graph")
    nccl = _where(_table(folder, "comm/nccl/*/nccl_perf.parquet"), op_name="all_reduce", nccl_dtype="half")
    times = [_fastest(_where(table, num_gpus=layout.tp), "message_size") for table in (own, nccl)]
    least = {place: min(one.get(place, np.inf) for one in times) for place in sorted({*times[0], *times[1]})}
    if not least:
        counts = sorted({*own["num_gpus"].tolist()})
        raise ValueError(f"cost.path={folder}: sums over tp={layout.tp} devices were not measured; measured: {counts}")
    # The table counts elements.
    return Curve([elements / layout.model.hidden for (elements,) in least], [*least.values()])


# --- attention


@dataclass(frozen=True, slots=True)
class KernelAttention:
    """Attention of one layer: prompts over (how many, length) without history, decodes over (how many, context).

    Chunks of n tokens after h count as a share 1 - (h / (h + n))^2 of a prompt of h + n, as AIConfigurator has it, and
    as one of as many like ones as there are chunks. Prefills and decodes of one step add up.
    """

    prompts: Points
    decodes: Points
    skew: float
    bounds: Bounds
    _prefill: Grid = field(init=False, repr=False, compare=False)
    _decode: Grid = field(init=False, repr=False, compare=False)
    _keys: float = field(init=False, repr=False, compare=False)
    """That decodes of the table read at most, all together."""

    def __post_init__(self) -> None:
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "_prefill", _rectangle(self.prompts))
        keep(self, "_decode", _rectangle(self.decodes))
        keep(self, "_keys", max(rows * context for rows, context in self.decodes))

    def seconds(self, shape: Shape) -> float:
        time = self._chunks(shape.chunks) if shape.chunks else 0.0
        if not shape.decodes:
            return time
        mean = shape.decode_context / shape.decodes
        time += self._decodes(shape.decodes, mean)
        if self.skew and shape.decode_longest > mean:
            longest = self._decodes(shape.decodes, shape.decode_longest)
            time += self.skew * (longest - self._decodes(shape.decodes, mean))
        return time

    def _decodes(self, rows: int, context: float) -> float:
        check = self.bounds.check
        check("decodes", rows, self._decode.axes[0][-1])
        check("decode_context", context, self._decode.axes[1][-1])
        check("keys of all decodes", rows * context, self._keys)
        return self._decode.at(rows, context)

    def _chunks(self, chunks: Iterable[tuple[int, int]]) -> float:
        many = [*chunks]
        count, check = len(many), self.bounds.check
        check("chunks", count, self._prefill.axes[0][-1])
        time = 0.0
        for history, length in many:
            whole = history + length
            check("prefill_history + prefill_tokens", whole, self._prefill.axes[1][-1])
            share = (1 - (history / whole) ** 2) * self._prefill.at(count, whole)
            time += max(share, self._prefill.at(count, length)) / count
        return time


def _attention(folder: Path, layout: Layout, skew: float, bounds: Bounds) -> dict[int | None, Attention]:
    """By window."""
    model = layout.model
    dtype = _format(_KV, model.precision.kv, folder, "kv")
    context = _table(folder, "attention/*/*/context_attention_perf.parquet")
    generation = _table(folder, "attention/*/*/generation_attention_perf.parquet")
    heads = dict(num_heads=model.heads // layout.tp, head_dim=model.head_dim, kv_cache_dtype=dtype)
    found: dict[int | None, Attention] = {}
    for window in dict.fromkeys(map(model.window, range(model.layers))):
        sizes = dict(heads, num_key_value_heads=layout.kv_heads, window_size=window or 0)
        prompts, decodes = _where(context, **sizes), _where(generation, **sizes)
        if not (len(prompts["latency"]) and len(decodes["latency"])):
            raise ValueError(
                f"cost.path={folder}: attention of {sizes['num_heads']} heads, {layout.kv_heads} KV heads of "
                f"{model.head_dim} in {dtype}, window {window or 'none'}, was not measured; try another tp"
            )
        known: dict[tuple[float, ...], float] = {
            (rows, step + 1): time for (rows, step), time in _fastest(decodes, "batch_size", "step").items()
        }
        found[window] = KernelAttention(_fastest(prompts, "batch_size", "isl"), known, skew, bounds)
    return found


def _rectangle(points: Points) -> Grid:
    """Rows of a ragged table go on in straight lines."""
    rows = sorted({row for row, _ in points})
    columns = sorted({column for _, column in points})
    values = []
    for row in rows:
        known = [(column, points[row, column]) for column in columns if (row, column) in points]
        line = Grid([[column for column, _ in known]], np.asarray([time for _, time in known]))
        values.append([line.at(column) for column in columns])
    return Grid([rows, columns], np.asarray(values))
