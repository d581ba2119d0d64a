"""`+experiment=calibrate`: times a backend's steps and writes the cost models that say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from omegaconf import DictConfig, OmegaConf

from analysis.waiting import waiting
from experiments import provenance, report, settings
from experiments.build import Parts, build, scheduler
from experiments.calibrate import clocks, serving
from experiments.calibrate.conclude import CLOCKS, FACTS, conclude, table, unsteady
from experiments.calibrate.design import Probe, Ramp, design, ramps
from experiments.calibrate.measure import measure
from experiments.progress import meter
from experiments.settings import SettingError, Settings
from experiments.study import Composer
from playground.sim.cost.profile import OWN, Profile


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Times every step of a design `passes` times, then serves requests with each of `policies` (overrides may follow a
    policy's name). Nothing is fitted to the last one's steps: they tell the error.

    Contexts reach up to `most_context` tokens; `requests` come at once, the last of what is served. The same run_dir
    again goes on where a calibration was interrupted.
    """

    policies: Sequence[str] = ("vllm_v1", "chunked_prefill policy.budget.tokens=512", "vllm_v0")
    passes: int = 3
    most_context: int = 32768
    requests: int = 320

    def __post_init__(self) -> None:
        for name in ("passes", "most_context", "requests"):
            if (value := getattr(self, name)) < 1:
                raise SettingError(f"study.{name}={value} must be at least 1")

    def run(self, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
        print(f"Calibrating into {folder}. Stopped, it goes on with the same command and run_dir={folder}")
        profile, place = self.calibrated(folder, Composer(folder, overrides))
        report.console().print(table(profile))
        if warning := unsteady(profile):
            print(warning)
        device, model = place.parent.parent.name, place.parent.name
        print(
            f"Profile: {place}\nSimulate with it: playground backend/cost=calibrated device={device} model={model} ..."
        )
        held_out = {name: error.mape for name, error in profile.held_out.items()}
        fitted = {name: error.mape for name, error in profile.fitted.held_out.items()} if profile.fitted else {}
        told = {"held_out_mape": held_out, "held_out_mape_fitted": fitted}
        return {"run_dir": str(folder), "profile": str(place)} | told

    def calibrated(self, folder: Path, composer: Composer) -> tuple[Profile, Path]:
        """The profile of what the composer's configurations say, and the file among the user's own that it is in."""
        self._measure(folder, composer)
        with waiting("fitting"):
            profile, place = conclude(folder)
        profile.save(OWN / place)
        return profile, OWN / place

    def _measure(self, folder: Path, composer: Composer) -> None:
        """Everything that needs the device."""
        config = composer.config("")
        wanted = settings.read(config)
        if wanted.parallel.replicas > 1:
            raise SettingError(
                f"parallel.replicas={wanted.parallel.replicas}: calibrate one replica (parallel.replicas=1); its "
                "profile holds for each"
            )
        folder.mkdir(parents=True, exist_ok=True)
        parts = build(wanted)
        try:
            probes = design(parts.backend.spec, _graphs(wanted), wanted.seed, self.most_context)
            rising = ramps(parts.backend.spec, self.most_context)
            self._describe(folder, config, wanted, parts, probes, rising)
            cuda = str(wanted.backend.get("device", "")).startswith("cuda")
            with clocks.recorded(folder / CLOCKS, cuda):
                with meter("timing steps", "steps") as shown:
                    measure(parts.backend, probes, rising, self.passes, folder, wanted.seed, shown)
                for policy in self.policies:
                    self._serve(folder / "served" / _plain(policy), composer, policy, parts)
        finally:
            parts.backend.close()

    def _describe(
        self,
        folder: Path,
        config: DictConfig,
        wanted: Settings,
        parts: Parts,
        probes: Sequence[Probe],
        rising: Sequence[Ramp],
    ) -> None:
        """What was measured where; that of an interrupted calibration must be the same."""
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
        probed = {probe.name: _told(probe) for probe in probes}
        described = {
            "spec": asdict(parts.backend.spec),
            "graphs": _graphs(wanted),
            "most_context": self.most_context,
            "seed": wanted.seed,
            "served": [_plain(policy) for policy in self.policies],
            "requests": self.requests,
            "probes": probed,
            "ramps": {ramp.name: [_told(probe) for probe in ramp.probes] for ramp in rising},
        }
        described = json.loads(json.dumps(described))
        file = folder / FACTS
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            if changed := [name for name in described if before.get(name) != described[name]]:
                raise SettingError(
                    f"run_dir={folder} holds a calibration with other settings ({', '.join(changed)}): give the same "
                    "ones to go on with it, or another run_dir"
                )
            return
        facts = provenance.facts() | {"device": parts.device, "cuda": _gpu()}
        provenance.write(file, facts | described)

    def _serve(self, folder: Path, composer: Composer, policy: str, parts: Parts) -> None:
        """With a policy of its own, on the backend that is there."""
        if (folder / "config.yaml").is_file():  # written last
            return
        config = composer.config("served", *f"policy={policy}".split())
        wanted = settings.read(config)
        rmtree(folder, ignore_errors=True)
        batches = serving.requests(parts.backend.spec, wanted.seed, self.requests, self.most_context)
        with meter(f"serving, {policy}") as shown:
            serving.log(parts.backend, scheduler(wanted, parts.backend.spec), batches, folder, shown)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")


def _plain(policy: str) -> str:
    """A folder's name."""
    return policy.replace(" ", "_").replace("/", "_")


def _told(probe: Probe) -> dict[str, Any]:
    return {"family": probe.family, "groups": list(map(list, probe.groups)), "copied_blocks": probe.copied_blocks}


def _graphs(wanted: Settings) -> bool:
    """Whether small steps are captured graphs, padded to the sizes of `playground.graphs`."""
    backend = wanted.backend
    return str(backend.get("device", "")).startswith("cuda") and backend.get("cuda_graphs") is not False


def _gpu() -> dict[str, Any] | None:
    """Of the first one that is visible to torch, if it was loaded."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
    }
