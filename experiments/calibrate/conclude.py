"""From a calibration's folder to a profile: what was measured is read, fitted, judged and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table
from yaml import YAMLError  # type: ignore[import-untyped]

from experiments.build import make
from experiments.calibrate import clocks
from experiments.calibrate.observe import Observed, observe
from experiments.settings import SettingError, Settings, read
from playground.model import ModelShape
from playground.sim.capacity import Layout
from playground.sim.cost import Roofline
from playground.sim.cost.calibrating import fit
from playground.sim.cost.lines import line
from playground.sim.cost.profile import MEASURED, HeldOut, Profile, cut_name, place, sizes_of
from playground.sim.cost.tabulating import Lacking, Seen
from playground.sim.device import Device

FACTS = "calibration.json"
CLOCKS = "clocks.csv"
PROFILE = "profile.json"
STEADY = 0.1
"""Spread of repetitions, from which on a calibration is not worth much."""
RANGE = ("tokens", "decode_context", "prefill_pairs", "sequences")
"""Of a step: the largest values that were timed bound what is predicted."""


def conclude(folder: Path, runs: Sequence[Path] = ()) -> tuple[Profile, Path]:
    """The profile of what lies in the folder, where it is written, too; and its place below a root of profiles.

    `runs`: other runs of the same engine to be fitted to.
    """
    facts, settings = _read(folder)
    model: ModelShape = make("model", settings.model, ModelShape)
    device: Device = make("device", settings.device, Device)
    parallel = settings.parallel
    cut = Layout.of(model, parallel.tp, parallel.stages, parallel.layers).layers
    observed = observe(folder, facts, Roofline(model, device, parallel.tp, parallel.stages, parallel.layers), runs)
    graph_rows = int(facts["spec"]["max_seqs"]) if facts["graphs"] else 0
    try:
        found = fit(observed.seen, graph_rows, _held_out(observed.seen, facts["served"]))
    except Lacking as error:
        raise SettingError(f"{folder}: {error}") from error
    profile = Profile(
        device=device.name,
        model=sizes_of(model),
        tp=parallel.tp,
        layers=list(cut),
        graph_rows=graph_rows,
        stages=found.stages,
        throttle=found.throttle,
        **_lines(observed),
        largest={name: float(max(getattr(step.shape, name) for step in observed.seen)) for name in RANGE},
        held_out=found.held_out,
        fitted=found.fitted,
        spread=median(observed.spread) if observed.spread else 0.0,
        facts=_facts(facts)
        | {
            "clocks": clocks.summary(folder / CLOCKS),
            "runs": [run.name for run in runs],
            "untimed": len(observed.untimed),
        },
    )
    profile.save(folder / PROFILE)
    return profile, place(device.name, str(settings.model.get("path", "model")), parallel.tp, cut)


def _read(folder: Path) -> tuple[dict[str, Any], Settings]:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        config = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(folder / "config.yaml"))
    except OSError as error:
        raise SettingError(f"{folder}: no calibration ({error.filename}: {error.strerror})") from error
    except (ValueError, YAMLError) as error:
        told = " ".join(str(error).split())
        raise SettingError(f"{folder}: {FACTS} or config.yaml cannot be read ({told}): calibrate anew") from error
    return facts, read(config)  # type: ignore[arg-type]


def _held_out(seen: Sequence[Seen], served: Sequence[str]) -> Any:
    """Random mixtures and, where several policies have served, the steps of the last one."""
    there = {step.source for step in seen}
    ran = [f"served {name}" for name in served if f"served {name}" in there]
    out = {"random", *ran[1:][-1:]}
    return lambda step: step.source in out


def _lines(observed: Observed) -> dict[str, Any]:
    gaps = observed.gaps
    units = {
        "sequence": [gap.shape.sequences for gap in gaps],
        "chunk": [len(gap.shape.chunks) for gap in gaps],
        # Who comes changes everybody's place in the batch: it is made anew, not continued.
        "mixed": [gap.shape.sequences if gap.shape.chunks else 0 for gap in gaps],
    }
    blocks = {"block": [blocks for blocks, *_ in observed.copies]}
    return {
        "host": line(units, [gap.seconds for gap in gaps], robust=False),  # what is held up by chance adds up, too
        "copy_out": line(blocks, [out for _, out, _ in observed.copies], relative=True),
        "copy_in": line(blocks, [back for *_, back in observed.copies], relative=True),
        "transfer": line({"token": [n for n, _ in observed.links]}, [seconds for _, seconds in observed.links]),
    }


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in ("probes", "ramps", "host")}


def table(profile: Profile) -> Table:
    """How far both models are off on steps that nothing was fitted to."""
    title = f"{profile.device}, {cut_name(profile.tp, profile.layers)}: errors on held-out steps"
    caption = r"\[..]: 95 % interval of the MAPE."
    if profile.spread:
        caption += f" Repetitions of a step are {profile.spread:.1%} apart (median)."
    if untimed := profile.facts.get("untimed"):
        caption += f" {untimed:,} steps, of which a stage is said to have taken no time, were left out."
    shown = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for name in ("steps", "count", "profiled: MAPE", "P95", "bias", "fitted: MAPE", "bias"):
        shown.add_column(name, justify="left" if name == "steps" else "right", no_wrap=name == "steps")
    others = profile.fitted.held_out if profile.fitted and profile.fitted.fitted_to == MEASURED else {}
    for name, error in profile.held_out.items():
        other = [_mape(others[name]), f"{others[name].bias:+.1%}"] if name in others else ["-", "-"]
        figures = (_mape(error), f"{error.p95:.1%}", f"{error.bias:+.1%}")
        shown.add_row(name.replace("_policy.", " "), f"{error.steps:,}", *figures, *other)
    return shown


def unsteady(profile: Profile) -> str | None:
    """What to tell somebody whose machine did other things meanwhile."""
    if profile.spread <= STEADY:
        return None
    return (
        f"Repetitions of the same step are {profile.spread:.0%} apart (median): something else used the device. "
        "Close it and calibrate again: no error can be smaller than that."
    )


def _mape(error: HeldOut) -> str:
    if error.low is None or error.high is None:
        return f"{error.mape:.1%}"
    return rf"{error.mape:.1%} \[{100 * error.low:.1f}..{100 * error.high:.1f}]"
