"""The cost model of a calibration: what steps of this engine took on this device, measured on purpose.

Made by `+experiment=calibrate`; what is measured and how it is read: docs/calibration.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost.model import IDLE, Cost
from playground.sim.cost.profile import TABLES, Profile, Throttle, cut_name, find, sizes_of
from playground.sim.cost.roofline import Roofline
from playground.sim.cost.shape import Shape
from playground.sim.cost.straight import StraightSurface, straight_surfaces
from playground.sim.cost.surface import Surface, step_bucket
from playground.sim.cost.tables import Bounds
from playground.sim.device import Device

FORMS = ("profiled", "fitted")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Steps, host time, copies and links as the profile at `path` says; null: this model's on this device, cut so.

    `form`: steps by its tables (`profiled`), or by its few coefficients (`fitted`), which are further off, but go on
    evenly where tables are coarse. All else is the same.
    A step larger than any that was timed is an error unless `extrapolate`. Compute and memory, which say what a step
    leaves to other lanes, are the sheet's, cut to the measured time. Communication is in the measured time.
    """

    model: ModelShape
    device: Device
    tp: int = 1
    stages: int = 1
    layers: Sequence[int] | None = None
    block_size: int = 16
    path: str | None = None
    extrapolate: bool = False
    form: str = "profiled"
    file: str = field(init=False, compare=False)
    """Where the profile was found."""
    profile: Profile = field(init=False, repr=False, compare=False)
    _sheet: Roofline = field(init=False, repr=False, compare=False)
    _surfaces: tuple[Surface | StraightSurface, ...] = field(init=False, repr=False, compare=False)
    _bounds: Bounds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"cost.form={self.form} must be one of {', '.join(FORMS)}")
        cut = Layout.of(self.model, self.tp, self.stages, self.layers).layers
        file = self.path or str(find(self.model, self.device.name, self.tp, cut))
        profile = Profile.load(file)
        if profile.model != sizes_of(self.model):
            raise ValueError(f"cost.path={file}: calibrated with another model ({_differences(profile, self.model)})")
        if (profile.tp, profile.layers) != (self.tp, list(cut)):
            raise ValueError(
                f"cost.path={file}: calibrated as {cut_name(profile.tp, profile.layers)} with layers {profile.layers}, "
                f"and the model is cut as {cut_name(self.tp, cut)} with {list(cut)}"
            )
        keep = object.__setattr__  # frozen: the one way to store what is derived once
        keep(self, "file", file)
        keep(self, "profile", profile)
        keep(self, "_sheet", Roofline(self.model, self.device, self.tp, self.stages, self.layers, self.block_size))
        keep(self, "_surfaces", tuple(_surfaces(profile, self.form, file)))
        keep(self, "_bounds", Bounds(file, self.extrapolate))

    @property
    def throttle(self) -> Throttle:
        """How the device slows down as it heats up: whoever tells durations keeps the heat."""
        return self.profile.throttle

    def stage(self, shape: Shape, stage: int) -> Cost:
        if not shape.tokens:
            return IDLE
        self._check(shape, self.profile.largest)
        surface = self._surfaces[stage]
        time = surface.seconds(shape)
        sheet = self._sheet.stage(shape, stage)
        launching = 0.0
        if self.profile.graph_rows and step_bucket(shape, self.profile.graph_rows) is None:
            launching = surface.launch(shape)
        return Cost(min(sheet.compute, time), min(sheet.memory, time), time, 0.0, launching)

    def ticking(self, shape: Shape) -> Iterator[float]:
        """Of decodes that go on, on the only stage: what `stage` says, without the sheet."""
        (surface,) = self._surfaces
        while True:
            shape = shape.tick()
            self._check(shape, self.profile.largest)
            yield surface.seconds(shape)

    def _check(self, shape: Shape, largest: Mapping[str, float]) -> None:
        for name, most in largest.items():
            if (value := getattr(shape, name)) > most:
                self._bounds.check(name, value, most)

    def host(self, shape: Shape) -> float:
        sequences, chunks = shape.sequences, len(shape.chunks)
        return self.profile.host.at(sequence=sequences, chunk=chunks, mixed=sequences if chunks else 0)

    def transfer(self, shape: Shape) -> float:
        """As measured between stages; the sheet's where nothing was."""
        if self.profile.transfer.coefficients.get("base", 0.0):
            return self.profile.transfer.at(token=shape.tokens)
        return self._sheet.transfer(shape)

    def copy(self, blocks: int) -> float:
        """Either direction alike: the mean of both; the sheet's where nothing was measured."""
        ways = self.profile.copy_out, self.profile.copy_in
        if all(way.coefficients.get("block", 0.0) for way in ways):
            return sum([way.at(block=blocks) for way in ways]) / 2
        return self._sheet.copy(blocks)


def _surfaces(profile: Profile, form: str, file: str) -> Sequence[Surface | StraightSurface]:
    """One a stage. `ValueError` where the profile has no coefficients; a warning where nobody measured them."""
    if form == "profiled":
        return [Surface(stage, profile.graph_rows) for stage in profile.stages]
    if profile.fitted is None:
        raise ValueError(
            f"cost.form=fitted: the profile {file} has tables only; take form=profiled, calibrate again, or fit to its "
            f"tables: python -m experiments.calibrate --tables {file}"
        )
    if profile.fitted.fitted_to == TABLES:
        warnings.warn(f"cost.form=fitted: {file} was fitted to its own tables, not to measurements", stacklevel=4)
    return straight_surfaces(profile.fitted, profile.stages, profile.graph_rows)


def _differences(profile: Profile, model: ModelShape) -> str:
    wanted = sizes_of(model)
    unlike = [name for name in wanted if profile.model.get(name) != wanted[name]]
    return ", ".join(f"{name} {profile.model.get(name)}, not {wanted[name]}" for name in unlike)
