"""Configurations as the front door composes them, for commands that are not Hydra's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from experiments import launcher, overrides, plugins, settings


def composed(given: Sequence[str]) -> DictConfig:
    """What `playground GIVEN...` would run; its `run_dir` is to be set."""
    for registering in (settings, plugins, launcher):
        registering.register()
    arguments = ["run_dir=unset", *given]
    running = GlobalHydra.instance().is_initialized()  # an experiment of the front door, which has the same
    with nullcontext() if running else initialize_config_module("conf", version_base="1.3"):
        config = overrides.completing(partial(compose, "config"), arguments)
    overrides.retarget(config, arguments)
    return config
