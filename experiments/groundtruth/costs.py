"""The cost models that are put to the test, by name, each held to physics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.groundtruth.calibration import Unknowns
from experiments.groundtruth.case import Unsupported
from experiments.groundtruth.physics import Held
from playground.model import ModelShape
from playground.sim.capacity import kv_blocks
from playground.sim.cost import CostModel, Roofline
from playground.sim.device import Device

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on devices: names of the shipped shapes and sheets. `eager`: no CUDA graphs."""

    model: str
    device: str
    tp: int = 1
    eager: bool = False

    @property
    def shape(self) -> ModelShape:
        return _model(self.model)

    @property
    def sheet(self) -> Device:
        return _device(self.device)

    def kv_blocks(self) -> int:
        """KV blocks of vLLM's default utilisation."""
        return kv_blocks(self.shape, self.sheet, self.tp, block_size=BLOCK)


def cost_model(name: str, hardware: Hardware, host: Unknowns) -> CostModel:
    """Raises `Unsupported` where this cost model knows nothing of the hardware."""
    return Held(COSTS[name](hardware, host), hardware.shape, hardware.sheet, hardware.tp)


def _roofline(hardware: Hardware, host: Unknowns) -> CostModel:
    return Roofline(
        hardware.shape,
        hardware.sheet,
        hardware.tp,
        block_size=BLOCK,
        graph_rows=0 if hardware.eager else 512,  # vLLM captures up to 512 rows
        host_base=host.base,
        host_per_sequence=host.per_sequence,
    )


@cache
def _model(name: str) -> ModelShape:
    return ModelShape.read(name)


@cache
def _device(name: str) -> Device:
    sheet = files("conf").joinpath("device", f"{name}.yaml").read_text(encoding="utf-8")
    device: Device = instantiate(OmegaConf.create(sheet))
    return device


COSTS: Mapping[str, Callable[[Hardware, Unknowns], CostModel]] = {"roofline": _roofline}

__all__ = ["COSTS", "Hardware", "Unsupported", "cost_model"]
