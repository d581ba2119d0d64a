"""How long a step takes on a system of several devices: kernels by a cost model, exchanges by links.

Ranks in lockstep wait for one another at every layer, ranks without work take part with a dummy, and padding makes
ranks equally busy. Who shares a port with whom is `fabric`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Protocol, cast

from playground.core import Step
from playground.model import ModelShape
from playground.sim.collectives import Exchange
from playground.sim.cost import Cost, CostModel, Shape
from playground.sim.durations import LaneTimes, Modelled, StepTimes, Work
from playground.sim.migration import seconds
from playground.sim.overlap import Half, Seconds, in_chunks, in_turns, split
from playground.sim.processor import Kernels
from playground.sim.traffic import Traffic

DUMMY = Shape(1, 1, 0, 1, 1, 1, 0, 0)
"""What a rank without work computes so that the collectives find it: one token (gLLM, RapidLLM)."""

PADDING = ("graphs", "always", "never")
OVERLAPS = ("none", "lanes", "two_batch", "single_batch", "row_chunks")


@dataclass(frozen=True, slots=True)
class Manners:
    """How the ranks of a system go about a step together.

    `padding`, in lockstep, to the rank with most tokens: `graphs`: when all ranks decode, since they replay graphs of
    one size (gLLM); `always` (vLLM); `never`. `overlap`: `none`: exchanges wait for kernels and kernels for
    exchanges; `lanes`: while one lane exchanges, the others have the device; `two_batch`: each half of a batch
    exchanges while the other computes, prompts being cut where whole ones would leave a side less than
    `overlap_threshold` of the tokens; `single_batch`: tokens travel to their experts while the shared experts compute;
    `row_chunks`: products before all-reduces are computed in `overlap_chunks` parts, each summed while the next is
    computed. The last three in steps of at least `overlap_rows` tokens.
    """

    padding: str = "graphs"
    overlap: str = "none"
    overlap_rows: int = 0
    overlap_threshold: float = 0.48
    overlap_chunks: int = 2

    def __post_init__(self) -> None:
        if self.padding not in PADDING:
            raise ValueError(f"parallel.padding={self.padding} must be one of {', '.join(PADDING)}")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"parallel.overlap={self.overlap} must be one of {', '.join(OVERLAPS)}")
        if self.overlap_rows < 0:
            raise ValueError(f"parallel.overlap_rows={self.overlap_rows} must be 0 or more tokens")
        if not 0 <= self.overlap_threshold <= 0.5:
            raise ValueError(
                f"parallel.overlap_threshold={self.overlap_threshold} must lie in [0, 0.5]; 0 cuts no prompt"
            )
        if self.overlap_chunks < 2:
            raise ValueError(f"parallel.overlap_chunks={self.overlap_chunks} must be at least 2")


def check_overlap(overlap: str, model: ModelShape, tp: int, lockstep: bool) -> None:
    """Whether there is anything to overlap; one line that says what to set if not."""
    if overlap == "row_chunks" and tp == 1:
        raise ValueError(
            "parallel.overlap=row_chunks: sums over tensor-parallel devices are chunked, and parallel.tp=1; "
            "raise it, or set parallel.overlap=none"
        )
    if overlap == "single_batch" and not (lockstep and model.experts and model.experts.shared):
        lacks = "parallel.dp_attention=false" if not lockstep else "the model has none"
        raise ValueError(
            f"parallel.overlap=single_batch: the way to the experts is hidden behind shared experts, and {lacks}; "
            "take model=deepseek-v2-lite parallel=dp_attention or the like, or set parallel.overlap=none"
        )


class Pooling(Protocol):
    """A cost model whose experts may compute for more tokens than a rank has itself."""

    def stage(self, shape: Shape, stage: int, pooled: int = 0) -> Cost:
        """`pooled`: tokens of all ranks that share the experts."""
        ...


class System(Modelled):
    """Durations on a cluster. The cost model's own communication is replaced by what the links say.

    `shared`: lanes are told as `Work` and bytes, for a backend whose ports are shared; else in plain seconds.
    `shared_experts`: seconds that those of one layer take for so many tokens, to overlap a single batch;
    `row_products`: of the products before a layer's all-reduces, to be computed in chunks. `recut`: the
    cost model of another cut, where layers may move; a KV block has `layer_block_bytes` for each of them.
    """

    def __init__(
        self,
        cost: CostModel,
        traffic: Traffic,
        manners: Manners | None = None,
        shared: bool = False,
        shared_experts: Seconds | None = None,
        row_products: tuple[Seconds, Seconds] | None = None,
        recut: Callable[[tuple[int, ...]], CostModel] | None = None,
        layer_block_bytes: float = 0.0,
    ) -> None:
        cluster = traffic.cluster
        super().__init__(cost, cluster.stages)
        self._ticking = None  # a cost model alone knows nothing of links
        self._traffic = traffic
        self._manners = manners or Manners()
        self._shared = shared
        self._ranks = cluster.replicas if cluster.lockstep else 1
        pools = cluster.lockstep and traffic.model.experts is not None
        self._pooling = _pooling(cost) if pools else None
        self._shared_experts = shared_experts
        self._row_products = row_products
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
        enough = max(tokens) >= max(2, manners.overlap_rows)
        if manners.overlap == "two_batch" and enough:
            return self._two_batches(ranks, stage)
        busy = self._busy(ranks, stage)
        exchange = self._exchange(ranks, stage)
        if manners.overlap == "row_chunks" and enough:
            return self._row_chunks(max(tokens), busy, exchange, stage)
        hidden = self._hidden(tokens, stage) if manners.overlap == "single_batch" and enough else 0.0
        kernels = busy.seconds - hidden + exchange.latency
        return Work(kernels, exchange.wire, compute=busy.compute, memory=busy.memory)

    def _hidden(self, tokens: list[int], stage: int) -> float:
        """Of shared experts, as much as there is of the way to the others, in every layer that has both."""
        traffic = self._traffic
        if self._shared_experts is None or not traffic.cluster.lockstep or not (count := traffic.expert_layers(stage)):
            return 0.0
        return count * min(traffic.experts(tokens).time, self._shared_experts(max(tokens)))

    def _busy(self, ranks: list[Shape], stage: int) -> Kernels:
        """Kernels or their launching, whichever is slower: who launches eagerly holds up the others' graphs."""
        if self._pooling:
            pooled = sum([shape.tokens for shape in ranks])
            costs = [self._pooling.stage(shape, stage, pooled) for shape in ranks]
        else:
            costs = [self._cost.stage(shape, stage) for shape in ranks]
        slowest = max(costs, key=_kernels)
        return Kernels(max(slowest.kernels, max([cost.host for cost in costs])), slowest.compute, slowest.memory)

    def _exchange(self, ranks: list[Shape], stage: int) -> Exchange:
        return self._traffic.collectives(
            stage, [shape.tokens for shape in ranks], max(shape.sampled for shape in ranks)
        )

    def _two_batches(self, ranks: list[Shape], stage: int) -> Work:
        """Halves take turns at every layer (weights are read twice). A rank with less to do has dummies in its stead.

        Without a second half there is nothing to take turns with: then as without overlap.
        """
        halves = list(zip(*[split(shape, self._manners.overlap_threshold) for shape in ranks], strict=True))
        if not all(any(shape.tokens for shape in half) for half in halves):
            halves = [tuple(ranks)]
        sides = [[shape if shape.tokens else DUMMY for shape in half] for half in halves]
        busy = [self._busy(side, stage) for side in sides]
        waits = [self._exchange(side, stage) for side in sides]
        kernels = Kernels(*map(sum, zip(*busy, strict=True)))
        wait = sum([exchange.time for exchange in waits])
        if len(sides) == 1 or not wait:
            return Work(kernels.seconds, wait, compute=kernels.compute, memory=kernels.memory)
        layers = self._traffic.layers[stage]
        first, second = [Half(k.seconds / layers, c.time / layers) for k, c in zip(busy, waits, strict=True)]
        return _overlapped(in_turns(first, second, layers), kernels, wait)

    def _row_chunks(self, tokens: int, busy: Kernels, exchange: Exchange, stage: int) -> Work:
        """Products before sums over tensor-parallel devices in chunks of rows; experts' are left whole."""
        traffic, chunks = self._traffic, min(self._manners.overlap_chunks, tokens)
        if self._row_products is None or traffic.cluster.tp == 1:
            return Work(busy.seconds + exchange.latency, exchange.wire, compute=busy.compute, memory=busy.memory)
        rows = -(-tokens // chunks)
        reduce = traffic.cluster.tensor.all_reduce(rows * traffic.token_bytes).time
        whole = traffic.cluster.tensor.all_reduce(tokens * traffic.token_bytes).time
        output, last = self._row_products
        dense = traffic.layers[stage] - traffic.expert_layers(stage)
        longer = total = 0.0
        for product, count in ((output, traffic.layers[stage]), (last, dense)):
            longer += count * (chunks * product(rows) - product(tokens))
            total += count * (in_chunks(product(rows), reduce, chunks) - product(tokens) - whole)
        kernels = busy._replace(seconds=busy.seconds + longer, memory=busy.memory + longer)
        sent = exchange.time + (traffic.layers[stage] + dense) * (chunks * reduce - whole)
        return _overlapped(busy.seconds + exchange.time + total, kernels, sent)


def _pooling(cost: CostModel) -> Pooling:
    """The cost model as one that knows of other ranks' tokens; one line if it is none."""
    if "pooled" in signature(cost.stage).parameters:
        return cast(Pooling, cost)
    raise ValueError(
        f"backend.cost={type(cost).__name__} cannot tell what experts take for other ranks' tokens: take "
        "playground.sim.cost.Roofline, or parallel.dp_attention=false"
    )


def padded(shape: Shape, tokens: int) -> Shape:
    """With rows that mean nothing until there are so many; among decodes they are decodes of one key."""
    more = tokens - shape.tokens
    if shape.tokens != shape.decodes:
        return shape._replace(tokens=tokens)
    return shape._replace(tokens=tokens, decodes=tokens, decode_context=shape.decode_context + more)


def _overlapped(seconds: float, kernels: Kernels, wire: float) -> Work:
    """So many seconds in all, of kernels and exchanges that go on beside each other."""
    tail = seconds - max(kernels.seconds, wire)
    return Work(kernels.seconds, wire, True, tail, kernels.compute, kernels.memory)


def _kernels(cost: Cost) -> float:
    return cost.kernels
