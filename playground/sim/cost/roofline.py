"""The cost model of sheets and configs: each operator at the rate that the device achieves, nothing fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import hypot
from typing import NamedTuple

from playground.graphs import CHUNKS, PREFILL_SIZES, decode_sizes, mixed_sizes
from playground.model import Experts, ModelShape, Reach
from playground.sim.capacity import Layout
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.routing import Loads, measured, zipf
from playground.sim.cost.shape import Shape
from playground.sim.device import Device

ATTENTION_TILE = 64
"""Half of the 128 queries or keys that attention kernels handle at a time: what a row loses to rounding on average.
It stands for the cost per row in H200 and RTX 4090 decode tables, and the poor efficiency of short chunks."""


class _Windowed(NamedTuple):
    """Coefficients of the layers of one stage that see no further back than `window` keys; seconds as in `_Stage`."""

    window: int
    decode_compute: float
    joint_compute: float
    decode_memory: float
    prefill_compute: float
    prefill_memory: float


class _Stage(NamedTuple):
    """Coefficients of one stage: seconds per what the name says."""

    linear_compute: float
    """Per token, rounded up to the GEMM tile."""
    linear_memory: float
    """Once: all matrices that every token meets."""
    expansion: float
    """Per token before a prefill's: making its keys and values from a latent vector; 0 for other attention."""
    activation: float
    """Per token: element-wise kernels and the KV write."""
    decode_compute: float
    """Per key read by a decode, in the layers that see all keys."""
    joint_compute: float
    """The same in a launch that decodes share with prefills."""
    decode_memory: float
    prefill_compute: float
    """Per (query, key) pair."""
    prefill_memory: float
    """Per key read by a prefill."""
    windowed: tuple[_Windowed, ...]
    latency: float
    """Once: start and drain of kernels."""
    eager: float
    """Once: launching the layers one by one."""
    reduce_latency: float
    """Once: all collectives."""
    reduce: float
    """Per token."""
    head_compute: float
    """Per sampled row, rounded up to the GEMM tile; 0 but on the last stage."""
    head_memory: float
    """Once if any row is sampled."""
    logits: float
    """Per sampled row: writing logits and reading them to sample."""
    gather: float
    """Per sampled row: collecting logits over the ranks."""
    expert_compute: float
    """Per row of a routed expert; 0 without."""
    expert_memory: float
    """Per routed expert whose weights are read."""
    expert_activation: float
    """Per token: element-wise kernels about the experts, gathering and adding up."""


class _Busy(NamedTuple):
    """Seconds, as in `Cost`."""

    compute: float
    memory: float
    kernels: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """From a model's config and a device's sheet, with nothing fitted to end-to-end runs.

    `layers` says how many layers each stage holds (default: even over `stages`). Pure decodes of at most `graph_rows`
    rows replay a CUDA graph, padded to the next size that one is captured for (`graph_sizes`; default: the engine's);
    all else is launched eagerly, as everything is with 0. `mixed_graphs`: at most 16 chunks of 527 prompt tokens in
    all, beside that many decodes, replay one, too, padded as our engine pads them. `skew`: attention takes as if that
    share of the decodes were as long as the longest. Host times are those of an engine's scheduler and input
    preparation, never of the simulator's own.

    `ep` groups of ranks hold whole experts each; the ranks of `pooling` replicas share the experts (DP attention).
    Experts are picked by Zipf's law with the exponent `expert_skew` (0: all alike), or as the histogram `expert_counts`
    of tokens by expert says.
    """

    model: ModelShape
    device: Device
    tp: int = 1
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    graph_rows: int = 256
    graph_sizes: Sequence[int] | None = None
    mixed_graphs: bool = False
    skew: float = 0.03
    host_base: float = 2e-4
    host_per_sequence: float = 3e-6
    ep: int = 1
    pooling: int = 1
    expert_skew: float = 0.0
    expert_counts: Sequence[float] | None = None
    _stages: tuple[_Stage, ...] = field(init=False, repr=False, compare=False)
    _padded: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Rows of the graph that so many decodes replay."""
    _beside: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Rows of the graph that so many decodes beside prefills replay."""
    _prefills: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Tokens of the graph that so many prefill tokens replay."""
    _loads: Loads | None = field(init=False, repr=False, compare=False)
    _transfer: float = field(init=False, repr=False, compare=False)
    _copy: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        layout = Layout.of(self.model, self.tp, self.stages, self.layers, self.ep, self.pooling)
        layout.check_fits(self.device)
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "layers", layout.layers)
        keep(self, "stages", layout.stages)
        keep(self, "_stages", tuple(_coefficients(layout, self.device, stage) for stage in range(layout.stages)))
        keep(self, "_padded", _padded(_sizes(self.graph_rows, self.graph_sizes)))
        mixed = self.mixed_graphs and self.graph_rows
        keep(self, "_beside", _padded(mixed_sizes(self.graph_rows)) if mixed else ())
        keep(self, "_prefills", _padded([size - 1 for size in PREFILL_SIZES]) if mixed else ())
        keep(self, "_loads", self._routing(self.model.experts) if self.model.experts else None)
        keep(self, "_transfer", self.model.streams * self.model.hidden * self.model.dtype_bytes / self.device.link)
        largest = max(layout.kv_bytes_per_token(stage) for stage in range(layout.stages))
        keep(self, "_copy", self.block_size * largest / self.device.host_link)

    def _check(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"cost.skew={self.skew} must lie in 0..1")
        if self.block_size < 1:
            raise ValueError(f"cost.block_size={self.block_size} must be at least 1")
        for name in ("graph_rows", "host_base", "host_per_sequence", "expert_skew"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"cost.{name}={value} must be 0 or more")
        if self.expert_counts is not None and self.expert_skew:
            raise ValueError(f"cost.expert_skew={self.expert_skew} and cost.expert_counts are both given: choose one")

    def _routing(self, experts: Experts) -> Loads:
        if self.expert_counts is not None:
            return Loads(measured(experts, self.expert_counts), self.ep)
        return Loads(zipf(experts, self.expert_skew), self.ep, dealt=True)

    def stage(self, shape: Shape, stage: int, pooled: int = 0) -> Cost:
        """One pass over the weights for all tokens, then attention, then (last stage) the head for sampled rows.

        `pooled`: tokens of all ranks for which this one's experts compute, where these are more than its own.
        """
        tokens, _, sampled, decodes, context, longest, pairs, prefix, chunks, contexts = shape
        if not tokens:
            return IDLE
        one, launching, rows = self._stages[stage], 0.0, tokens
        if tokens == decodes < len(self._padded):
            rows, launching = self._padded[tokens], self.device.graph_launch
            context += rows - decodes  # a row of padding reads one key
            decodes, sampled = rows, sampled and rows
        elif decodes < len(self._beside) and tokens - decodes < len(self._prefills) and len(chunks) <= CHUNKS:
            beside, launching = self._beside[decodes or 1], self.device.graph_launch
            rows = beside + self._prefills[tokens - decodes] + 1
            context += beside - decodes
            decodes, sampled = beside, beside + CHUNKS
        else:
            launching = one.eager
        tile = self.device.gemm_tile
        linear = one.linear_compute * (rows if rows <= tile else -(-rows // tile) * tile)
        if one.expansion:
            linear += one.expansion * (prefix - tokens + shape.decodes)
        stream, activation = one.linear_memory, one.activation * rows
        keys = context + self.skew * (decodes * longest - context) + ATTENTION_TILE * decodes
        decode_compute = (one.joint_compute if pairs else one.decode_compute) * keys
        decode_memory = one.decode_memory * keys
        prefill_compute = one.prefill_compute * (pairs + ATTENTION_TILE * prefix)
        prefill_memory = one.prefill_memory * prefix
        compute = linear + decode_compute + prefill_compute
        memory = stream + activation + decode_memory + prefill_memory
        kernels = one.latency + hypot(linear, stream) + activation
        kernels += decode_memory if decode_memory > decode_compute else decode_compute
        kernels += prefill_memory if prefill_memory > prefill_compute else prefill_compute
        for layers in one.windowed:
            read = min(context, decodes * layers.window)
            if contexts is not None and longest > layers.window:
                read = contexts.within(layers.window) + decodes - shape.decodes  # a row of padding reads one key
            work, moved, busy = self._windowed(layers, decodes, read, longest, chunks)
            compute, memory, kernels = compute + work, memory + moved, kernels + busy
        if one.expert_memory:
            work, moved, busy = self._experts(one, pooled if pooled > tokens else tokens)
            compute, memory, kernels = compute + work, memory + moved, kernels + busy
        communication = one.reduce_latency + one.reduce * rows
        if sampled and one.head_memory:
            head = one.head_compute * (sampled if sampled <= tile else -(-sampled // tile) * tile)
            logits = one.logits * sampled
            compute += head
            memory += one.head_memory + logits
            kernels += hypot(head, one.head_memory) + logits
            communication += one.gather * sampled
        return Cost(compute, memory, kernels, communication, launching)

    def _windowed(
        self, layers: _Windowed, decodes: int, read: int, longest: int, chunks: Sequence[tuple[int, int]]
    ) -> _Busy:
        """Of layers that see `window` keys, of which decodes `read` so many in all."""
        window, decode_compute, joint_compute, decode_memory, prefill_compute, prefill_memory = layers
        if chunks:
            decode_compute = joint_compute
        keys = read + self.skew * (decodes * min(longest, window) - read) + ATTENTION_TILE * decodes
        pairs, read = _seen(chunks, window)
        pairs += ATTENTION_TILE * read
        decode = (decode_compute * keys, decode_memory * keys)
        prefill = (prefill_compute * pairs, prefill_memory * read)
        return _Busy(decode[0] + prefill[0], decode[1] + prefill[1], max(decode) + max(prefill))

    def _experts(self, one: _Stage, tokens: int) -> _Busy:
        """Of routed experts: rows are rounded up to small tiles expert by expert, on average by half of one."""
        assert self._loads is not None
        rows, distinct = self._loads.of(tokens)
        work = one.expert_compute * (rows + (self.device.gemm_tile >> 3) * distinct)
        moved, gathered = one.expert_memory * distinct, one.expert_activation * tokens
        return _Busy(work, moved + gathered, hypot(work, moved) + gathered)

    def ticking(self, shape: Shape) -> Iterator[float]:
        """What `stage` says of stage 0 and `shape.tick(1)`, `shape.tick(2)`, ... (pure decodes), to the last bit.

        Only what attention reads changes: the rest is worked out once. `tests/playground/test_ticks.py` holds every
        model to it; whoever adds a term to `stage` adds it here, or leaves its models to the first line.
        """
        one = self._stages[0]
        if one.windowed:
            return (self.stage(shape.tick(ticks), 0).device_time for ticks in count(1))
        return self._ticking(one, shape)

    def _ticking(self, one: _Stage, shape: Shape) -> Iterator[float]:
        fixed, tokens, tile = self.stage(shape, 0), shape.tokens, self.device.gemm_tile
        graph = tokens < len(self._padded)
        rows = self._padded[tokens] if graph else tokens
        sampled = rows if graph and shape.sampled else shape.sampled
        linear = one.linear_compute * (rows if rows <= tile else -(-rows // tile) * tile)
        before = one.latency + hypot(linear, one.linear_memory) + one.activation * rows
        experts = self._experts(one, tokens).kernels if one.expert_memory else 0.0
        head = 0.0
        if sampled and one.head_memory:
            head = one.head_compute * (sampled if sampled <= tile else -(-sampled // tile) * tile)
            head = hypot(head, one.head_memory) + one.logits * sampled
        skew, tiles, each = self.skew, ATTENTION_TILE * rows, max(one.decode_compute, one.decode_memory)
        context, longest = shape.decode_context + rows - tokens, shape.decode_longest
        while True:
            context += tokens
            longest += 1
            kernels = before + each * (context + skew * (rows * longest - context) + tiles) + experts + head
            yield (kernels if kernels > fixed.host else fixed.host) + fixed.communication

    def host(self, shape: Shape) -> float:
        return self.host_base + self.host_per_sequence * shape.sequences

    def transfer(self, shape: Shape) -> float:
        """One hidden state per token; ranks of a tensor-parallel stage send to their peers over the same link."""
        return self.device.link_latency + self._transfer * shape.tokens

    def copy(self, blocks: int) -> float:
        return self.device.host_latency + self._copy * blocks if blocks else 0.0


def _sizes(most: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Batches that graphs are captured for, up to `most` rows."""
    if sizes is None:
        return decode_sizes(most) if most else ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"cost.graph_sizes={list(sizes)} must be numbers of rows, at least 1 each")
    return tuple(size for size in sorted(sizes) if size <= most)


def _padded(sizes: Sequence[int]) -> tuple[int, ...]:
    """For 0, 1, 2, ... rows the next larger size."""
    padded: list[int] = [0]
    for size in sizes:
        padded += [size] * (size + 1 - len(padded))
    return tuple(padded) if sizes else ()


def _seen(chunks: Sequence[tuple[int, int]], window: int) -> tuple[int, int]:
    """(query, key) pairs, and keys read, of chunks of `length` tokens after `start` that see `window` keys at most."""
    pairs = read = 0
    for start, length in chunks:
        end = start + length
        pairs += length * start + (length * (length + 1) >> 1)
        if end > window:
            beyond = end - window  # keys that the last query does not see; the first to miss any misses `first`
            first = max(1, start + 1 - window)
            pairs -= (beyond * (beyond + 1) - first * (first - 1)) >> 1
        read += min(end, length + window - 1)
    return pairs, read


def _coefficients(layout: Layout, device: Device, stage: int) -> _Stage:
    model, numbers = layout.model, layout.stage_layers(stage)
    layers, experts = len(numbers), layout.expert_layers(stage)
    products = device.products(model.precision.eight_bit_weights)
    last = stage == layout.stages - 1
    attention = _attention(layout, device, numbers)
    full = attention.pop(0, _Windowed(0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return _Stage(
        linear_compute=sum(map(layout.matrix_flops, numbers)) / products,
        linear_memory=sum(layout.matrix_bytes(one) + layout.vector_bytes(one) for one in numbers) / device.bandwidth,
        expansion=layers * model.expansion_flops / layout.tp / products,
        activation=sum(activation_bytes(layout, one) for one in numbers) / device.bandwidth,
        **dict(zip(_Windowed._fields[1:], full[1:], strict=True)),
        windowed=tuple(attention.values()),
        latency=(layers + last) * device.kernel_latency + experts * _expert_latency(layout, device),
        eager=(layers + last) * device.eager_launch,
        **_reduce(layout, device, layers),
        **(_head(layout, device) if last else dict.fromkeys(_HEAD, 0.0)),
        **_experts(layout, device, experts),
    )


def _attention(layout: Layout, device: Device, numbers: Sequence[int]) -> dict[int, _Windowed]:
    """By how far back queries see; 0: everything. A layer of compressed attention has a part in several."""
    rate, model = layout.tp * device.attention_flops, layout.model
    # Latent and compressed attention have kernels of their own for decodes.
    tile = 1 if model.latent or model.compressed else device.decode_tile
    found: dict[int, _Windowed] = {}
    for number in numbers:
        for reach, decode_flops, kv, prefill_kv in _reaches(layout, number):
            window = reach.window or 0
            before = found.get(window, _Windowed(window, 0.0, 0.0, 0.0, 0.0, 0.0))
            found[window] = _Windowed(
                window,
                before.decode_compute + decode_flops / rate,
                before.joint_compute + tile * decode_flops / rate,
                before.decode_memory + kv / device.bandwidth,
                before.prefill_compute + reach.flops / rate,
                before.prefill_memory + prefill_kv / device.bandwidth,
            )
    return dict(sorted(found.items()))


def _reaches(layout: Layout, layer: int) -> list[tuple[Reach, float, float, float]]:
    """Each with FLOPs of a pair in a decode, and bytes of a key on one rank in a decode and in a prefill."""
    model = layout.model
    if model.compressed:
        size = model.precision.kv_bytes(model.dtype_bytes)
        reaches = model.compressed.reaches(layer, model.heads, model.head_dim)
        return [(one, one.flops, one.width * size, one.width * size) for one in reaches]
    if indexer := model.indexer:
        # Scored whole on every rank, by none of the heads that ranks share.
        scoring, key, read = indexer.flops * layout.tp, indexer.cached_bytes, model.attended_bytes
        best = (Reach(indexer.top, model.attention_flops, 0.0), model.decode_flops, read, read)
        return [(Reach(None, scoring, 0.0), scoring, key, key), best]
    kv = layout.kv_bytes_per_token_layer
    # What is expanded from a latent vector is written once and read once, in the dtype.
    expanded = 2 * model.expanded_width / layout.tp * model.dtype_bytes
    return [(Reach(model.window(layer), model.attention_flops, 0.0), model.decode_flops, kv, kv + expanded)]


def activation_bytes(layout: Layout, layer: int) -> float:
    """Of one token in one layer: gate and up read and their product written; two residual norms read and written,
    half of it from the cache; query, key and value read and written once for rotation and the KV write."""
    model = layout.model
    inner = model.intermediate
    if model.experts and model.has_experts(layer):
        inner = model.experts.shared
    width = 3 * inner / layout.tp
    # Several streams are read to be joined, and read again and written to be mixed, twice a layer.
    width += (2 * model.norms if model.streams == 1 else 3 * model.streams + 2) * model.hidden
    width += 2 * (model.heads // layout.tp) * model.head_dim
    width += 2 * model.latent.cached if model.latent else 4 * layout.kv_heads * model.head_dim
    return width * model.dtype_bytes


def _experts(layout: Layout, device: Device, layers: int) -> dict[str, float]:
    """Of layers that have routed experts."""
    model = layout.model
    if model.experts is None or not layers:
        return dict(expert_compute=0.0, expert_memory=0.0, expert_activation=0.0)
    width = model.experts.intermediate / layout.expert_slices
    products = device.expert_products(model.precision.eight_bit_experts) / (1 + device.expert_width / width)
    # Gate and up are written and read, their product is written and read; each pick's hidden state is written by its
    # expert and read to be added up. Picks of other ranks' experts are walked, too, and filled with zeros.
    elements = model.experts.active * (2 * model.hidden + 5 * width)
    streaming = device.bandwidth
    if model.precision.packed_experts:
        elements, streaming = elements / layout.ep, streaming * device.unpack_fraction
    return dict(
        expert_compute=layers * layout.expert_flops / products,
        expert_memory=layers * layout.expert_bytes / streaming,
        expert_activation=layers * elements * model.dtype_bytes / device.bandwidth / device.gather_fraction,
    )


def _expert_latency(layout: Layout, device: Device) -> float:
    """Of one layer with routed experts, beyond the bytes."""
    precision = layout.model.precision
    found = device.dealt_packed_latency if precision.packed_experts else device.dealt_latency
    quantised = device.quantise_latency if precision.eight_bit_experts else 0.0
    return device.expert_latency + quantised + (found if layout.ep > 1 else 0.0)


def _reduce(layout: Layout, device: Device, layers: int) -> dict[str, float]:
    """Latency and seconds per token of two all-reduces per layer; a ring moves 2 (tp-1)/tp of the data."""
    if layout.tp == 1:
        return dict(reduce_latency=0.0, reduce=0.0)
    moved = 2 * (layout.tp - 1) / layout.tp * layout.model.hidden * layout.model.dtype_bytes
    return dict(reduce_latency=2 * layers * device.link_latency, reduce=2 * layers * moved / device.link)


_HEAD = ("head_compute", "head_memory", "logits", "gather")


def _head(layout: Layout, device: Device) -> dict[str, float]:
    """Logits are written in the model's dtype and read once in float32 to sample: the slope of vLLM's sampler on an
    RTX 4090, 0.74 us a row of 128,256 logits, is 5.5 bytes a logit."""
    model, tp = layout.model, layout.tp
    return dict(
        head_compute=model.head_flops / tp / device.gemm_flops,
        head_memory=model.head_bytes / tp / device.bandwidth,
        logits=model.vocabulary * (model.dtype_bytes + 4) / device.bandwidth,
        gather=(tp - 1) / tp * model.vocabulary * model.dtype_bytes / device.link,
    )
