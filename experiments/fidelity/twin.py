"""The simulated twin of a run on hardware: the same configuration on a simulator, free-running. Besides, every decision
is replayed and every step predicted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from os.path import relpath
from pathlib import Path
from shutil import rmtree
from typing import Any

from omegaconf import DictConfig, OmegaConf

from analysis.waiting import waiting
from experiments import provenance, run
from experiments.build import Plan, Simulated, make, plan_of, setting
from experiments.composing import composed
from experiments.fidelity.hardware import POINT
from experiments.fidelity.predict import predict
from experiments.parity import prove
from experiments.settings import SettingError, Settings, read
from playground.check.parity import Divergence
from playground.core import Spec
from playground.sim.cost import Calibrated, CostModel

VERSION = 1
PAIR = "pair.json"
"""Written last: what holds it is complete."""
SIMULATORS = ("backend", "device", "links")
"""Groups that a twin may have otherwise than its run."""
FACTS = ("device", "started_at", "host", "versions", "revision", "model")


@dataclass(frozen=True, slots=True)
class Made:
    """A pair's folder, and whether it was made now."""

    folder: Path
    anew: bool


def pair(hardware: Path, study: Path, more: Sequence[str], title: str) -> Made:
    """Make a pair of a run's folder, unless it is there, of the same run and the same simulator.

    `more`: overrides of the simulated run. `SettingError` if that would schedule under other limits, or the run did not
    come to its end.
    """
    described, labels = _described(hardware), _labels(hardware)
    config = twin_of(hardware, described["spec"], more)
    cost = _cost(config, described["spec"])
    folder = study / "pairs" / str(labels["name"])
    made_of = _digest(hardware, config, cost)
    if _is_made_of(folder / PAIR, made_of):
        return Made(folder, anew=False)
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _link(hardware.resolve(), folder / "hardware", study)
    predict(hardware, cost, folder / "predicted.parquet")
    with waiting(f"{title}: replaying"):
        parity = _parity(hardware)
    config.run_dir = str(folder / "simulated")
    run.execute(config, f"{title}: simulating")
    told = {"version": VERSION, **labels, "hardware": _facts(hardware, described), "cost": _told(cost)}
    fitted_to = cost.profile.facts.get("runs", []) if isinstance(cost, Calibrated) else []
    provenance.write(folder / PAIR, told | {"parity": parity, "fitted_to": fitted_to, "made_of": made_of})
    return Made(folder, anew=True)


def _described(hardware: Path) -> dict[str, Any]:
    file = hardware / "run.json"
    if not file.is_file() or not (content := file.read_text(encoding="utf-8")):  # empty while the run begins
        raise SettingError("not the folder of a run: it has no run.json")
    found: dict[str, Any] = json.loads(content)
    if found.get("ended") != "completed":
        raise SettingError(f"the run {_end(found)}; a twin needs one that completed")
    return found


def _end(described: Mapping[str, Any]) -> str:
    return {"failed": "failed", "interrupted": "was interrupted"}.get(described.get("ended", ""), "was killed")


def _labels(hardware: Path) -> dict[str, Any]:
    """As its plan says; of any other run, its folder's name and the whole policy."""
    if (file := hardware / POINT).is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {label: kept[label] for label in ("name", "group", "policy", "workload", "load", "pool", "repeat")}
    name = hardware.resolve().name
    return {"name": name, "group": name, "policy": name, "workload": "-", "load": "-", "pool": "-", "repeat": 0}


def _facts(hardware: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """What the run says of its machine, and its plan's runner of the GPU."""
    point = hardware / POINT
    kept = json.loads(point.read_text(encoding="utf-8")) if point.is_file() else {}
    facts = {name: described.get(name) for name in FACTS}
    return facts | {name: kept[name] for name in ("gpu", "driver", "clocks") if name in kept}


def _link(hardware: Path, place: Path, study: Path) -> None:
    """A study with its own runs can be moved."""
    inside = study.resolve() in hardware.parents
    place.symlink_to(relpath(hardware, place.parent.resolve()) if inside else hardware, target_is_directory=True)


def twin_of(hardware: Path, spec: Mapping[str, Any], more: Sequence[str]) -> DictConfig:
    """The run's own configuration with a simulated backend, and the pool that the engine found room for."""
    config = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(hardware / "config.yaml"))
    assert isinstance(config, DictConfig)
    groups = {override: override.lstrip("+").partition("=")[0].replace("/", ".").partition(".")[0] for override in more}
    for override, group in groups.items():
        if group not in SIMULATORS:
            raise SettingError(f"{override}: a twin takes what its run had, but for {', '.join(SIMULATORS)}")
        if override.startswith("backend="):
            raise SettingError(f"{override}: a twin is simulated; leave it out, and choose a cost model with --cost")
    room = ["++backend.utilization=1.0", "++backend.reserve_bytes=0.0"]
    chosen = composed(["backend=sim", *more, *room])
    for group in {"backend", *groups.values()}:
        config[group] = chosen[group]
    config.kv.blocks, config.kv.block_size = spec["blocks"], spec["block_size"]
    config.limits.max_seqs, config.limits.max_tokens = spec["max_seqs"], spec["max_tokens"]
    config.plots, config.run_dir = False, "unset"
    return config


def _cost(config: DictConfig, recorded: Mapping[str, Any]) -> CostModel:
    """The cost model that the twin will have, once it is sure to schedule under its run's limits."""
    wanted = read(config)
    backend: Simulated = make("backend", wanted.backend, Simulated)
    plan: Plan = plan_of(wanted)
    with setting("backend"):
        ours, theirs = asdict(backend.make(plan).spec), asdict(Spec(**recorded))
        cost = backend.cost_model(plan)
    if unlike := [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if _matters(name, ours, theirs)]:
        raise SettingError(f"the run was scheduled under other limits: {'; '.join(unlike)}; is the device= the same?")
    return cost


def _matters(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Stepping once or many times at a time is the backend's own business."""
    return name != "repeats" and ours[name] != theirs[name]


def _digest(hardware: Path, config: DictConfig, cost: CostModel) -> dict[str, str]:
    """Of all that a pair is made of but the code."""
    parts = {"run": (hardware / "run.json").read_bytes(), "twin": OmegaConf.to_yaml(config, resolve=True).encode()}
    if file := _told(cost)["file"]:
        parts["cost"] = Path(file).read_bytes()
    return {name: sha256(content).hexdigest()[:16] for name, content in parts.items()}


def _is_made_of(file: Path, made_of: Mapping[str, str]) -> bool:
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("made_of") == made_of


def _told(cost: CostModel) -> dict[str, Any]:
    """Which cost model it is, and the file that it was read from."""
    return {"model": type(cost).__name__, "file": getattr(cost, "file", None) or getattr(cost, "path", None)}


def _parity(hardware: Path) -> dict[str, Any]:
    try:
        report = prove(hardware)
    except Divergence as divergence:
        return {"identical": False, "steps": 0, "text": str(divergence)}
    return {"identical": True, "steps": report.steps, "text": str(report)}
