"""The runs of a counterfactual: the recorded one, the same policy simulated from the branch on, and another policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from analysis.metrics import load as tables_of
from analysis.metrics import summarize
from experiments import provenance
from experiments.build import Parts, build, make, objectives, scheduler, setting
from experiments.composing import composed
from experiments.counterfactual.model import cost_model
from experiments.fidelity.twin import twin_of
from experiments.progress import Shown, Watched
from experiments.run import amend, describe
from experiments.settings import SettingError, read
from playground.check.branch import Branch, Spliced, Switch, lanes_of
from playground.check.parity import Divergence
from playground.check.recording import Recording, load
from playground.core import MAIN
from playground.policy import Policy
from playground.sim.backend import SimBackend
from playground.sim.cost import CostModel
from playground.trace import Trace
from playground.workload.source import OpenLoop


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's folder, read. `config`: of its twin, which schedules under the same limits."""

    folder: Path
    recording: Recording
    config: DictConfig
    cost: CostModel
    """What goes on after the branch."""

    @property
    def steps(self) -> int:
        return len(self.recording.decisions)


@dataclass(frozen=True, slots=True)
class Played:
    """One continuation: its folder, when it branched (seconds of the run), and whether later arrivals are its own."""

    folder: Path
    instant: float
    closed: bool


def recorded(folder: Path, cost: Sequence[str] = ()) -> Recorded:
    """A run to be continued. `cost`: overrides that choose a cost model; by default a simulated run's own, else the
    calibrated one. `SettingError` if that is no run, or none that can be continued.
    """
    if not (folder / "run.json").is_file():
        raise SettingError(f"{folder} is not the folder of a run: it has no run.json")
    described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    config = twin_of(folder, described["spec"], cost or ["backend/cost=calibrated"])
    own = OmegaConf.load(folder / "config.yaml").backend
    if not cost and own._target_ == config.backend._target_:
        config.backend.cost = own.cost
    config.backend.skip_ahead = False
    with setting("run"):
        recording = load(folder)
    if not recording.whole:
        raise SettingError(f"{folder}: the run did not come to its end")
    if extra := lanes_of(recording) - {MAIN}:
        raise SettingError(f"{folder}: lanes that share a device ({', '.join(sorted(extra))}) cannot be continued")
    return Recorded(folder, recording, config, cost_model(config, bool(cost)))


def policy_of(config: DictConfig, words: Sequence[str]) -> Any:
    """The run's policy, changed: `policy=NAME` takes another one, `policy/PART=NAME` a part, `policy.X=V` a value."""
    whole = [word for word in words if word.startswith("policy=")]
    for word in words:
        if "=" not in word or not word.startswith(("policy=", "policy/", "policy.")):
            raise SettingError(f"{word}: only the policy changes: policy=NAME, policy/PART=NAME or policy.OPTION=VALUE")
    if whole:
        return composed(list(words)).policy
    policy = OmegaConf.create(OmegaConf.to_container(config.policy))
    assert isinstance(policy, DictConfig)
    parts = [word for word in words if word.startswith("policy/")]
    chosen = composed(parts).policy if parts else policy
    for word in words:
        name, _, value = word.partition("=")
        path = name.removeprefix("policy").lstrip("/.").replace("/", ".")
        if word.startswith("policy/"):
            OmegaConf.update(policy, path, OmegaConf.select(chosen, path), merge=False)
        elif OmegaConf.select(policy, path.rpartition(".")[0] or "_target_") is None:
            raise SettingError(f"{word}: the run's policy has no {path}")
        else:
            OmegaConf.update(policy, path, yaml.safe_load(value))
    return policy


def play(run: Recorded, policy: Any, at: int, folder: Path, title: str, shown: Shown) -> Played:
    """Serve the run again, from step `at` on under this policy, into a run folder of its own."""
    config = run.config.copy()
    config.run_dir = str(folder)
    settings = read(config)
    parts = build(settings)
    backend = _backend(run, parts, at)
    before: Policy = make("policy", settings.policy, Policy)
    after: Policy = make("policy", OmegaConf.to_container(policy, resolve=True), Policy)
    switch = Switch(before, after)
    config.policy = policy
    folder.mkdir(parents=True)
    describe(folder, config, parts)
    amend(folder, {"counterfactual": {"of": str(run.folder), "from_step": at}})
    with Trace(folder) as trace, shown(title) as meter:
        branch = Branch(run.recording, backend, Watched(parts.source, meter), switch, at, trace)
        try:
            branch.serve(scheduler(settings, backend.spec, switch))
        except Divergence as error:
            raise SettingError(f"{run.folder}: before step {at} it cannot be played again: {error.what}") from error
    amend(folder, {"ended": "completed"})
    provenance.write(folder / "summary.json", summarize(tables_of(folder), objectives(settings)))
    instant = branch.instant
    if instant is None:
        raise SettingError(f"--from-step {at}: the run has {run.steps:,} steps")
    return Played(folder, instant, not isinstance(parts.source, OpenLoop))


def _backend(run: Recorded, parts: Parts, at: int) -> SimBackend:
    backend = parts.backend
    assert isinstance(backend, SimBackend)
    if not backend.unshared:
        raise SettingError(
            f"{run.folder}: what its steps sent is not in its trace: those over links that are modelled (links=, "
            "lanes, uploads) cannot be continued"
        )
    backend.durations = Spliced(run.recording, at, backend.durations)
    return backend
