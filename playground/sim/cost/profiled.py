"""The cost model of measured tables: kernels as they were timed one by one, everything else from the sheet.

It knows no file: bundles of LLMServingSim's profiler and AIConfigurator's kernel tables have readers of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost import bundles, kernels
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.operators import Measured
from playground.sim.cost.roofline import Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import Bounds, Curve, find, shipped
from playground.sim.device import Device


@dataclass(frozen=True, slots=True)
class Profiled:
    """Kernels from the tables at `path`, everything else from the sheet.

    `path`: a folder of a profile, with `tpN` in it, or of AIConfigurator's kernel tables, with `gemm` and `attention`
    in it; or a shipped profile's name; null: the shipped one of this model on this device.

    What no table says is the roofline's: collectives, launches, transfers, copies, host times, and the demands on
    compute and memory that say what a kernel leaves to others, which are cut to the measured time. A step beyond the
    tables is an error unless `extrapolate`. `skew`: as measured in a profile's skew.csv unless given; 0 without it.
    `ep` and `pooling`: as in `Roofline`, as far as experts were timed so.
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
    ep: int = 1
    pooling: int = 1
    _sheet: Roofline = field(init=False, repr=False, compare=False)
    _layout: Layout = field(init=False, repr=False, compare=False)
    measured: Measured = field(init=False, repr=False, compare=False)
    _experts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Layers with experts of each stage."""
    _windows: tuple[dict[int | None, int], ...] = field(init=False, repr=False, compare=False)
    """How many layers of each stage see so far back, where their attention was timed apart."""

    def __post_init__(self) -> None:
        if self.skew is not None and not 0 <= self.skew <= 1:
            raise ValueError(f"cost.skew={self.skew} must lie in 0..1")
        layout = Layout.of(self.model, self.tp, self.stages, self.layers, self.ep, self.pooling)
        path = self.path or _matching(self.model, self.device)
        folder, bounds = find(path), Bounds(path, self.extrapolate)
        if kernels.found(folder):
            measured = kernels.read(folder, layout, self.device, self.skew or 0.0, bounds)
        else:
            measured = bundles.read(folder, layout, self.skew, bounds)
        stages = range(layout.stages)
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "_sheet", self._roofline())
        keep(self, "_layout", layout)
        keep(self, "measured", measured)
        keep(self, "_experts", tuple(map(layout.expert_layers, stages)))
        keep(self, "_windows", tuple(_windows(layout, stage, measured) for stage in stages))

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
            ep=self.ep,
            pooling=self.pooling,
        )

    def stage(self, shape: Shape, stage: int, pooled: int = 0) -> Cost:
        """`pooled`: tokens of all ranks for which this one's experts compute, where these are more than its own."""
        if not shape.tokens:
            return IDLE
        sheet, time = self._sheet.stage(shape, stage, pooled), self._kernels(shape, stage, max(pooled, shape.tokens))
        cost = sheet._replace(compute=min(sheet.compute, time), memory=min(sheet.memory, time), kernels=time)
        if self.measured.reduce is None:
            return cost
        return cost._replace(communication=self._communication(self.measured.reduce, shape, stage))

    def _kernels(self, shape: Shape, stage: int, pooled: int) -> float:
        measured, tokens, experts = self.measured, shape.tokens, self._experts[stage]
        operators, check, layers = measured.operators, measured.bounds.check, self._layout.layers[stage]
        check("tokens", tokens, operators.most)
        time = (layers - experts) * operators.with_mlp(tokens)
        if experts and operators.routed:
            check("tokens of all ranks that share experts", pooled, operators.routed.most)
            time += experts * operators.with_experts(tokens, pooled)
        for window, count in self._windows[stage].items():
            time += count * measured.attention[window].seconds(shape)
        if stage == 0:
            time += operators.first.at(tokens)
        if stage == self._layout.stages - 1 and shape.sampled:
            check("sampled", shape.sampled, operators.head.most)
            time += operators.last.at(tokens) + operators.head.at(shape.sampled)
        return time

    def _communication(self, reduce: Curve, shape: Shape, stage: int) -> float:
        """Two measured sums a layer; collecting logits is the sheet's."""
        self.measured.bounds.check("tokens of a sum over devices", shape.tokens, reduce.most)
        layers, last = self._layout.layers[stage], stage == self._layout.stages - 1
        gathered = (self.tp - 1) / self.tp * self.model.vocabulary * self.model.dtype_bytes / self.device.link
        return 2 * layers * reduce.at(shape.tokens) + last * gathered * shape.sampled

    def host(self, shape: Shape) -> float:
        return self._sheet.host(shape)

    def transfer(self, shape: Shape) -> float:
        return self._sheet.transfer(shape)

    def copy(self, blocks: int) -> float:
        return self._sheet.copy(blocks)


def _windows(layout: Layout, stage: int, measured: Measured) -> dict[int | None, int]:
    if len(measured.attention) == 1:
        return {next(iter(measured.attention)): layout.layers[stage]}
    return Counter(map(layout.model.window, layout.stage_layers(stage)))


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
