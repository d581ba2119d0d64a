"""What comparisons of several runs share: composing a run from overrides, running it, showing runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra import compose
from omegaconf import DictConfig

from analysis.metrics import Summary
from experiments import overrides as command_line
from experiments import run


@dataclass(frozen=True, slots=True)
class Composer:
    """Runs of one study; what the user set holds for all of them."""

    folder: Path
    overrides: Sequence[str]

    def run(self, name: str, title: str, *more: str) -> Summary:
        return run.execute(self.config(name, *more), title)

    def config(self, name: str, *more: str) -> DictConfig:
        # The user's come last: they win.
        given = [*more, *self._passed_on()]
        config = command_line.completing(partial(compose, "config"), given)
        command_line.retarget(config, given)
        config.run_dir = str(self.folder / name)
        return config

    def _passed_on(self) -> list[str]:
        own = ("+experiment=", "study.", "hydra.", "hydra/")
        return [override for override in self.overrides if not override.lstrip("+").startswith(own)]
