"""A fitted model for a profile that holds tables only: what was measured is lost, but not what the tables say of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.calibrate.design import design
from experiments.calibrate.observe import shape_of
from experiments.settings import SettingError
from playground.core import Spec
from playground.sim.cost.fitted import kind
from playground.sim.cost.judging import Pairs, judged
from playground.sim.cost.profile import MEASURED, TABLES, Profile
from playground.sim.cost.shape import Shape
from playground.sim.cost.straight import straight_of, straight_surfaces
from playground.sim.cost.surface import Surface


def fitted_to_tables(profile: Profile) -> Profile:
    """With coefficients fitted to what its tables say of the steps of the design.

    Held out are the random steps: errors are distances from the tables. `SettingError` where the
    profile is fitted to measurements, which no table is as good as, or does not say what was measured.
    """
    if profile.fitted is not None and profile.fitted.fitted_to == MEASURED:
        raise SettingError("--tables: this profile has a fitted model already, of measurements")
    rows = profile.graph_rows
    training, test = _steps(profile)
    surfaces = [Surface(stage, rows) for stage in profile.stages]
    seconds = [np.asarray([surface.seconds(shape) for shape in training]) for surface in surfaces]
    fitted = straight_of(training, seconds, np.ones(len(training)), profile.stages, rows, TABLES)
    groups: dict[str, Pairs] = {}
    straight = straight_surfaces(fitted, profile.stages, rows)
    for number, shape in enumerate(test):
        predicted, told = (sum(surface.seconds(shape) for surface in which) for which in (straight, surfaces))
        for name in ("random", f"random, {kind(shape)}"):
            groups.setdefault(name, Pairs()).add(predicted, told, number)
    return replace(profile, fitted=replace(fitted, held_out=judged(groups)))


def _steps(profile: Profile) -> tuple[list[Shape], list[Shape]]:
    """(fitted to, held out), none beyond what was timed."""
    facts = profile.facts
    if lacking := [name for name in ("spec", "graphs", "seed", "most_context") if name not in facts]:
        raise SettingError(f"--tables: the profile does not say what was measured (facts lacks {', '.join(lacking)})")
    found: tuple[list[Shape], list[Shape]] = [], []
    for probe in design(Spec(**facts["spec"]), facts["graphs"], facts["seed"], facts["most_context"]):
        shape = shape_of(probe.groups)
        if shape.tokens and all(getattr(shape, name) <= most for name, most in profile.largest.items()):
            found[probe.family == "random"].append(shape)
    return found
