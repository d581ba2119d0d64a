"""The cost models that are put to the test, by name, each held to physics. Collectives take what the links say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.groundtruth.around import Around
from experiments.groundtruth.calibration import Unknowns
from experiments.groundtruth.case import Unsupported
from experiments.groundtruth.physics import Floor, Held
from playground.model import ModelShape
from playground.sim.capacity import kv_blocks
from playground.sim.cluster import Cluster
from playground.sim.cost import Cost, CostModel, Profiled, Roofline, Shape
from playground.sim.device import Device
from playground.sim.links import Links, Sheet
from playground.sim.traffic import Traffic

BLOCK = 16
MARLIN_FRACTION, MARLIN_TILE = 0.245, 16
"""MXFP4 experts by Marlin reach 232 TFLOP/s on 16k tokens with 3072 wide slices, 175 with 384 (`moe_perf` of an H200,
vLLM 0.24: 241 TFLOP/s with the sheet's `expert_width`); few tokens are padded to tiles of 8 to 64."""
GRAPHS = 512
"""Rows that vLLM captures graphs for; SGLang and TensorRT-LLM have as many or fewer by default."""
HOSTS = {"h100": "dgx_h100", "h200": "dgx_h200", "a100_80": "dgx_a100"}
"""Links that a device has there; of others the device's own sheet tells."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on devices: names of the shipped shapes and sheets, number formats as `ModelShape.quantised` takes them.

    `eager`: no CUDA graphs. `ep`: groups of ranks that hold whole experts. `marlin`: experts of 4 bits are multiplied
    by Marlin, not by the kernels that the sheet speaks of.
    """

    model: str
    device: str
    tp: int = 1
    eager: bool = False
    weights: str | None = None
    kv: str | None = None
    ep: int = 1
    marlin: bool = False

    @property
    def shape(self) -> ModelShape:
        return _model(self.model, self.weights, self.kv)

    @property
    def sheet(self) -> Device:
        device: Device = _part("device", self.device)
        return replace(device, expert_fraction=MARLIN_FRACTION, gemm_tile=MARLIN_TILE) if self.marlin else device

    @property
    def links(self) -> Links:
        links: Links = _part("links", HOSTS[self.device]) if self.device in HOSTS else Sheet().of(self.sheet)
        return links

    def kv_blocks(self) -> int:
        """KV blocks of vLLM's default utilisation. Raises a `ValueError` where the weights do not fit."""
        return kv_blocks(self.shape, self.sheet, self.tp, block_size=BLOCK, ep=self.ep)


@dataclass(frozen=True, slots=True)
class Linked(Around):
    """A cost model of one stage whose collectives take what the links say."""

    traffic: Traffic
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds, by tokens and sampled rows: decodes ask for the same again and again."""

    def stage(self, shape: Shape, stage: int) -> Cost:
        cost = self.cost.stage(shape, stage)
        return Cost(cost.compute, cost.memory, cost.kernels, self._exchange(shape), cost.host)

    def _exchange(self, shape: Shape) -> float:
        size = shape.tokens, shape.sampled
        if (time := self._known.get(size)) is None:
            time = self._known[size] = self.traffic.collectives(0, [size[0]], size[1]).time if size[0] else 0.0
        return time


def cost_model(name: str, hardware: Hardware, unknowns: Unknowns) -> CostModel:
    """Raises `Unsupported` where this cost model knows nothing of the hardware."""
    cost = COSTS[name](hardware, unknowns)
    traffic = Traffic(hardware.shape, Cluster(hardware.links, hardware.tp), (hardware.shape.layers,))
    return Held(Linked(cost, traffic), Floor.of(hardware.shape, hardware.sheet, hardware.tp))


def _roofline(hardware: Hardware, unknowns: Unknowns) -> CostModel:
    return Roofline(hardware.shape, _launched(hardware, unknowns), ep=hardware.ep, **_common(hardware, unknowns))


def _profiled(hardware: Hardware, unknowns: Unknowns) -> CostModel:
    try:
        return Profiled(hardware.shape, _launched(hardware, unknowns), **_common(hardware, unknowns))
    except ValueError as error:
        raise Unsupported(str(error)) from error


def _launched(hardware: Hardware, unknowns: Unknowns) -> Device:
    return replace(hardware.sheet, eager_launch=unknowns.eager)


def _common(hardware: Hardware, unknowns: Unknowns) -> dict[str, Any]:
    return dict(
        tp=hardware.tp,
        block_size=BLOCK,
        graph_rows=0 if hardware.eager else GRAPHS,
        host_base=unknowns.base,
        host_per_sequence=unknowns.per_sequence,
    )


@cache
def _model(name: str, weights: str | None, kv: str | None) -> ModelShape:
    return ModelShape.read(name, weights=weights, kv=kv)


@cache
def _part(group: str, name: str) -> Any:
    sheet = files("conf").joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    return instantiate(OmegaConf.create(sheet))


COSTS: Mapping[str, Callable[[Hardware, Unknowns], CostModel]] = {"roofline": _roofline, "profiled": _profiled}
