"""Who computes what: ranks as a grid of replicas, pipeline stages and tensor-parallel ranks. It knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from engine.config import DecoderConfig
from engine.errors import EngineError
from playground.model import Experts, ModelShape

EXCHANGES = ("all_gather", "padded_all_gather", "all_to_all", "padded_all_to_all")
"""Ways of tokens to experts on other ranks, see `engine.parallel.exchange`."""


class Place(NamedTuple):
    """A rank's place in the grid."""

    replica: int
    stage: int
    tp_rank: int


class Held(NamedTuple):
    """What one rank has of a layer's experts: these, and of each the `part`th of `parts` equal shares of its width."""

    experts: range
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """`replicas` x `stages` x `tp` ranks, numbered in this order; `layers` says how many each stage has.

    Without `layers` they are dealt out evenly, the first stages taking one more where they do not divide. In lockstep
    (DP attention) a stage's ranks of all replicas share its experts, else those of one replica do: whole experts are
    dealt out `ep` times, and where more ranks share them than that, some have parts of the same ones. `exchange` is how
    tokens get there. A stage has room for `spare_layers` more than it begins with.
    """

    stages: int = 1
    tp: int = 1
    replicas: int = 1
    layers: tuple[int, ...] = ()
    lockstep: bool = False
    ep: int = 1
    exchange: str = "all_gather"
    spare_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "tp", "replicas", "ep"):
            if (value := getattr(self, name)) < 1:
                raise EngineError(f"parallel.{name}={value} must be at least 1")
        if self.spare_layers < 0 or (self.spare_layers and self.stages == 1):
            raise EngineError(
                f"parallel.spare_layers={self.spare_layers} must be 0, or more with parallel.stages of at least 2"
            )
        self._check_exchange()
        if self.sharing % self.ep:
            raise EngineError(
                f"parallel.ep={self.ep} must divide the {self.sharing} ranks that share experts: parallel.tp, times "
                "parallel.replicas with parallel.dp_attention=true"
            )

    def _check_exchange(self) -> None:
        if self.exchange not in EXCHANGES:
            raise EngineError(f"parallel.exchange={self.exchange} must be one of {', '.join(EXCHANGES)}")
        if self.exchange.endswith("all_to_all") and self.ep < self.sharing:
            raise EngineError(
                f"parallel.exchange={self.exchange} needs experts of its own on every rank: set "
                f"parallel.ep={self.sharing}, or gather"
            )

    @property
    def ranks(self) -> int:
        return self.replicas * self.stages * self.tp

    @property
    def sharing(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.tp * self.replicas if self.lockstep else self.tp

    def held(self, place: Place, experts: int) -> Held:
        """What a rank has of so many experts; ranks with parts of the same ones are neighbours."""
        if experts % self.ep:
            raise EngineError(f"parallel.ep={self.ep} must divide the model's {experts} experts; take one that does")
        each, parts = experts // self.ep, self.sharing // self.ep
        first, part = divmod(self.seat(place), parts)
        return Held(range(first * each, (first + 1) * each), part, parts)

    def seat(self, place: Place) -> int:
        """A rank's number among those that share its experts."""
        return place.tp_rank + (place.replica * self.tp if self.lockstep else 0)

    def place(self, rank: int) -> Place:
        """Where a rank of 0 .. ranks - 1 is."""
        replica, within = divmod(rank, self.stages * self.tp)
        return Place(replica, *divmod(within, self.tp))

    def rank(self, place: Place) -> int:
        return (place.replica * self.stages + place.stage) * self.tp + place.tp_rank

    def named(self, rank: int) -> str:
        """As errors speak of a rank."""
        place = self.place(rank)
        sizes = (("replica", self.replicas), ("stage", self.stages), ("tp_rank", self.tp))
        parts = [f"{name} {value}" for (name, size), value in zip(sizes, place, strict=True) if size > 1]
        return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")

    def cut(self, layers: int) -> tuple[int, ...]:
        """How many of the model's layers each stage has."""
        if self.layers:
            if len(self.layers) != self.stages or sum(self.layers) != layers or min(self.layers) < 1:
                raise EngineError(
                    f"parallel.layers={list(self.layers)} must give each of {self.stages} stages at least one of the "
                    f"model's {layers} layers, and all of them"
                )
            return self.layers
        if self.stages > layers:
            raise EngineError(f"parallel.stages={self.stages}: the model has {layers} layers; take fewer stages")
        each, more = divmod(layers, self.stages)
        return tuple(each + (stage < more) for stage in range(self.stages))

    def span(self, stage: int, layers: int) -> range:
        """Which of the model's layers a stage has."""
        ends = [0, *accumulate(self.cut(layers))]
        return range(ends[stage], ends[stage + 1])


def check_divides(shape: ModelShape, layout: Layout) -> None:
    """Refuse a model whose heads, widths or experts the ranks of a layout cannot share."""
    tp = layout.tp
    sizes = {"heads": shape.heads, "intermediate": shape.intermediate}
    if shape.experts is None and layout.ep > 1:
        raise EngineError(f"parallel.ep={layout.ep}: the model has no experts; set parallel.ep=1 or take one that has")
    if shape.experts is not None:
        sizes |= {"experts.shared": shape.experts.shared}
        parts = layout.held(Place(0, 0, 0), shape.experts.count).parts
        if shape.experts.intermediate % parts:
            raise EngineError(
                f"parallel: {parts} ranks cannot share the model's {shape.experts.intermediate} experts.intermediate; "
                "raise parallel.ep, or take fewer ranks"
            )
    for name, value in sizes.items():
        if value % tp:
            raise EngineError(f"parallel.tp={tp} does not divide the model's {value} {name}; take a tp that does")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise EngineError(
            f"parallel.tp={tp} and the model's {shape.kv_heads} kv_heads: one must divide the other; take another tp"
        )


def local_config(config: DecoderConfig, layout: Layout, place: Place) -> DecoderConfig:
    """What one rank has of a model: its stage's layers, its share of heads and widths. Vocabularies stay whole.

    Where there are more ranks than KV heads, a head is held by several.
    """
    shape, tp = config.shape, layout.tp
    check_divides(shape, layout)
    span = layout.span(place.stage, shape.layers)
    local = replace(
        shape,
        layers=len(span),
        heads=shape.heads // tp,
        kv_heads=max(shape.kv_heads // tp, 1),
        intermediate=shape.intermediate // tp,
        windows=shape.windows[span.start : span.stop],
        experts=None if shape.experts is None else _local_experts(shape.experts, span, layout, place),
    )
    return replace(config, shape=local, windows=config.windows[span.start : span.stop])


def _local_experts(experts: Experts, span: range, layout: Layout, place: Place) -> Experts:
    """A share of them; layers count from the stage's first."""
    held = layout.held(place, experts.count)
    return replace(
        experts,
        count=len(held.experts),
        active=min(experts.active, len(held.experts)),
        intermediate=experts.intermediate // held.parts,
        shared=experts.shared // layout.tp,
        dense=tuple(layer - span.start for layer in experts.dense if layer in span),
    )
