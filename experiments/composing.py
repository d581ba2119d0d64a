"""Configurations as the front door composes them, for commands that are not Hydra's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from experiments import launcher, overrides, plugins, settings


def composed(given: Sequence[str]) -> DictConfig:
    """What `playground GIVEN...` would run; its `run_dir` is to be set."""
    for registering in (settings, plugins, launcher):
        registering.register()
    arguments = ["run_dir=unset", *given]
    with initialize_config_module("conf", version_base="1.3"):
        config = overrides.completing(partial(compose, "config"), arguments)
    overrides.retarget(config, arguments)
    return config
