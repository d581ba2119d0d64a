"""`python -m experiments parity RUN_DIR`: did the backend and the simulator decide alike?

A run's own durations and the instants at which it looked at the clock are played again through the simulator, with a
fresh policy built from the run's configuration.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from experiments.build import scheduler, setting
from experiments.settings import SettingError, Settings, read
from playground.check.parity import Report, replay
from playground.check.recording import load


def prove(run_dir: Path) -> Report:
    """What was compared; a `Divergence` shows the first decision that differs."""
    settings = recorded_settings(run_dir)
    with setting("run_dir"):
        recording = load(run_dir)
    return replay(recording, scheduler(settings, recording.spec))


def recorded_settings(run_dir: Path) -> Settings:
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise SettingError(f"run_dir={run_dir} is not the folder of a run: it has no config.yaml")
    config = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(file))
    return read(config)  # type: ignore[arg-type]
