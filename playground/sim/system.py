"""How long a step takes on a system of several devices: kernels by a cost model, exchanges by links.

Ranks in lockstep wait for one another at every layer, ranks without work take part with a dummy, and padding makes
ranks equally busy. Who shares a port with whom is `fabric`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from inspect import signature
from math import hypot
from typing import Protocol, cast

from playground.core import Step
from playground.model import ModelShape
from playground.sim.collectives import NONE, Exchange
from playground.sim.cost import Cost, CostModel, Shape
from playground.sim.device import Device
from playground.sim.durations import LaneTimes, Modelled, StepTimes, Work
from playground.sim.migration import seconds
from playground.sim.traffic import Traffic

DUMMY = Shape(1, 1, 0, 1, 1, 1, 0, 0)
"""What a rank without work computes so that the collectives find it: one token (gLLM, RapidLLM)."""

PADDING = ("graphs", "always", "never")
OVERLAPS = ("none", "lanes", "two_batch", "single_batch")


@dataclass(frozen=True, slots=True)
class Manners:
    """How the ranks of a system go about a step together.

    `padding`, in lockstep, to the rank with most tokens: `graphs`: when all ranks decode, since they replay graphs of
    one size (gLLM); `always` (vLLM); `never`. `overlap`: `none`: exchanges wait for kernels and kernels for
    exchanges; `lanes`: while one lane exchanges, the others have the device; `two_batch`: each half of a batch
    exchanges while the other computes, in steps of at least `overlap_rows` tokens; `single_batch`: tokens travel to
    their experts while the shared experts compute.
    """

    padding: str = "graphs"
    overlap: str = "none"
    overlap_rows: int = 0

    def __post_init__(self) -> None:
        if self.padding not in PADDING:
            raise ValueError(f"parallel.padding={self.padding} must be one of {', '.join(PADDING)}")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"parallel.overlap={self.overlap} must be one of {', '.join(OVERLAPS)}")
        if self.overlap_rows < 0:
            raise ValueError(f"parallel.overlap_rows={self.overlap_rows} must be 0 or more tokens")


class Pooling(Protocol):
    """A cost model whose experts may compute for more tokens than a rank has itself."""

    def stage(self, shape: Shape, stage: int, pooled: int = 0) -> Cost:
        """`pooled`: tokens of all ranks that share the experts."""
        ...


class System(Modelled):
    """Durations on a cluster. The cost model's own communication is replaced by what the links say.

    `shared`: lanes are told as `Work` and bytes, for a backend whose ports are shared; else in plain seconds.
    `shared_experts`: seconds that those of one layer take for so many tokens, to overlap a single batch. `recut`: the
    cost model of another cut, where layers may move; a KV block has `layer_block_bytes` for each of them.
    """

    def __init__(
        self,
        cost: CostModel,
        traffic: Traffic,
        manners: Manners | None = None,
        shared: bool = False,
        shared_experts: Callable[[int], float] | None = None,
        recut: Callable[[tuple[int, ...]], CostModel] | None = None,
        layer_block_bytes: float = 0.0,
    ) -> None:
        cluster = traffic.cluster
        super().__init__(cost, cluster.stages)
        self._traffic = traffic
        self._manners = manners or Manners()
        self._shared = shared
        self._ranks = cluster.replicas if cluster.lockstep else 1
        pools = cluster.lockstep and traffic.model.experts is not None
        self._pooling = _pooling(cost) if pools else None
        self._shared_experts = shared_experts
        self._recut = recut
        self._layer_block_bytes = layer_block_bytes
        self._first = (cost, traffic)
        self._cuts: dict[int, tuple[CostModel, Traffic]] = {}
        """Of groups whose layers have moved."""
        self._moving: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        """When which layers will be where, by group."""

    def of(self, step: Step) -> StepTimes:
        if self._recut:
            self._move(step, self._recut)
        return super().of(step)

    def _move(self, step: Step, recut: Callable[[tuple[int, ...]], CostModel]) -> None:
        """Take the group's present cut; a move is over when its KV has arrived, and the next one starts after it."""
        group, coming = step.group, self._moving.setdefault(step.group, [])
        while coming and coming[0][0] <= step.planned:
            _, layers = coming.pop(0)
            self._cuts[group] = recut(layers), replace(self._first[1], layers=layers)
        self._cost, self._traffic = self._cuts.get(group, self._first)
        if self._pooling:
            self._pooling = _pooling(self._cost)
        if step.move:
            begins, before = coming[-1] if coming else (step.planned, self._traffic.layers)
            took = seconds(step.move, before, self._traffic.cluster, group, self._layer_block_bytes)
            coming.append((begins + took, step.move.layers))

    def _lane(self, shapes: list[Shape]) -> LaneTimes:
        ranks = self._everybody(shapes)
        works = [self.work(ranks, stage) for stage in self._stages]
        if not self._shared:
            return LaneTimes(tuple([work.alone for work in works]))
        most = max([shape.tokens for shape in ranks])
        return LaneTimes(tuple(works), most * self._traffic.token_bytes)

    def _everybody(self, shapes: list[Shape]) -> list[Shape]:
        """Every rank of the group as it really computes: dummies and padding included."""
        ranks = shapes + [DUMMY] * (self._ranks - len(shapes))
        if self._ranks == 1 or self._manners.padding == "never":
            return ranks
        decoding = all(shape.tokens == shape.decodes for shape in ranks)
        if self._manners.padding == "graphs" and not decoding:
            return ranks
        most = max(shape.tokens for shape in ranks)
        return [padded(shape, most) for shape in ranks]

    def work(self, ranks: list[Shape], stage: int) -> Work:
        """Of one stage: everybody waits for the slowest kernels and the slowest launching at every layer."""
        manners = self._manners
        tokens = [shape.tokens for shape in ranks]
        if manners.overlap == "two_batch" and max(tokens) >= max(2, manners.overlap_rows):
            return self._two_batches(ranks, stage)
        busy = self._busy(ranks, stage)
        exchange = self._exchange(ranks, stage)
        if manners.overlap == "single_batch":
            busy -= self._hidden(tokens, stage)
        return Work(busy + exchange.latency, exchange.wire)

    def _hidden(self, tokens: list[int], stage: int) -> float:
        """Of shared experts, as much as there is of the way to the others, in every layer that has both."""
        traffic = self._traffic
        if self._shared_experts is None or not traffic.cluster.lockstep or not (count := traffic.expert_layers(stage)):
            return 0.0
        return count * min(traffic.experts(tokens).time, self._shared_experts(max(tokens)))

    def _busy(self, ranks: list[Shape], stage: int) -> float:
        """Kernels or their launching, whichever is slower: who launches eagerly holds up the others' graphs."""
        if self._pooling:
            pooled = sum([shape.tokens for shape in ranks])
            costs = [self._pooling.stage(shape, stage, pooled) for shape in ranks]
        else:
            costs = [self._cost.stage(shape, stage) for shape in ranks]
        return max(max([cost.kernels for cost in costs]), max([cost.host for cost in costs]))

    def _exchange(self, ranks: list[Shape], stage: int) -> Exchange:
        return self._traffic.collectives(
            stage, [shape.tokens for shape in ranks], max(shape.sampled for shape in ranks)
        )

    def _two_batches(self, ranks: list[Shape], stage: int) -> Work:
        """Halves take turns: in L layers 2 L max(k, c) + min(k, c), with k and c those of half a batch in a layer."""
        halves = [half(shape) for shape in ranks]
        kernels = 2 * self._busy(halves, stage)
        exchange = self._exchange(halves, stage)
        waits = 2 * exchange.time
        tail = min(kernels, waits) / 2 / self._traffic.layers[stage]
        return Work(kernels, waits, True, tail) if exchange != NONE else Work(kernels, 0.0)

    def ticks(self, step: Step) -> Iterator[tuple[float, float]]:
        shape = Shape.of_columns(step.columns)
        while True:
            shape = shape.tick()
            yield self._cost.host(shape), self.work([shape], 0).alone


def _pooling(cost: CostModel) -> Pooling:
    """The cost model as one that knows of other ranks' tokens; one line if it is none."""
    if "pooled" in signature(cost.stage).parameters:
        return cast(Pooling, cost)
    raise ValueError(
        f"backend.cost={type(cost).__name__} cannot tell what experts take for other ranks' tokens: take "
        "playground.sim.cost.Roofline, or parallel.dp_attention=false"
    )


def shared_experts(model: ModelShape, device: Device, tp: int) -> Callable[[int], float] | None:
    """Seconds that the shared experts of one layer take, as the roofline takes any matrices; None without them."""
    if model.experts is None or not model.experts.shared:
        return None
    weights = 3 * model.hidden * model.experts.shared / tp
    memory = weights * model.dtype_bytes / device.bandwidth

    def seconds(tokens: int) -> float:
        return hypot(2 * weights * tokens / device.gemm_flops, memory)

    return seconds


def padded(shape: Shape, tokens: int) -> Shape:
    """With rows that mean nothing until there are so many; among decodes they are decodes of one key."""
    more = tokens - shape.tokens
    if shape.tokens != shape.decodes:
        return shape._replace(tokens=tokens)
    return shape._replace(tokens=tokens, decodes=tokens, decode_context=shape.decode_context + more)


def half(shape: Shape) -> Shape:
    """The larger half of a batch; a prompt is cut, too, and its later half sees the earlier one."""
    cut = [(start, -(-length // 2)) for start, length in shape.chunks]
    return shape._replace(
        tokens=-(-shape.tokens // 2),
        sequences=-(-shape.sequences // 2),
        sampled=-(-shape.sampled // 2),
        decodes=-(-shape.decodes // 2),
        decode_context=-(-shape.decode_context // 2),
        prefill_pairs=-(-shape.prefill_pairs // 2),
        chunks=tuple(cut),
    )
