"""The load that simulators' speed is compared on: composed as any run here, and written down for the others."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from experiments import launcher, overrides, plugins, settings
from experiments.build import Parts, build, make
from experiments.settings import Settings
from playground.core import Arrive, Request
from playground.model import ModelShape
from playground.sim.cost.model import CostModel
from playground.sim.device import Device
from playground.workload.source import Source

BLOCK = 512
"""Tokens that one hash of Mooncake's format stands for."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the peers must be told of a run: its requests, its KV blocks, and what its steps take."""

    requests: list[Request]
    blocks: int
    cost: CostModel
    layers: int


def parts(given: Sequence[str]) -> Parts:
    """A run's parts from its overrides."""
    return build(_settings(given))


def read(given: Sequence[str]) -> Load:
    """The load of a run on one device, from the run's overrides."""
    wanted = _settings(given)
    run = build(wanted)
    model, device = make("model", wanted.model, ModelShape), make("device", wanted.device, Device)
    cost = instantiate(wanted.backend["cost"])(model=model, device=device)
    return Load(_requests(run.source), run.backend.spec.blocks, cost, model.layers)


def _settings(given: Sequence[str]) -> Settings:
    for registering in (settings, plugins, launcher):
        registering.register()
    with initialize_config_module("conf", version_base="1.3"):
        config = overrides.completing(lambda known: compose("config", known), ["run_dir=unused", *given])
    return settings.read(config)


def _requests(source: Source) -> list[Request]:
    """All that an open loop yields, in order of arrival."""
    found: list[Request] = []
    while (due := source.due()) < inf:
        found += [event.request for event in source.take(due) if isinstance(event, Arrive)]
    return found


def write_azure(file: Path, workload: Iterable[Request]) -> None:
    """As Vidur's trace replay reads it: seconds and tokens, all on the day "any"."""
    with file.open("w", newline="", encoding="ascii") as text:
        rows = csv.writer(text)
        rows.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
        rows.writerows(["any", one.arrival, one.prompt_length, one.max_tokens] for one in workload)


def write_mooncake(file: Path, workload: Iterable[Request]) -> None:
    """Mooncake's format, in ms; every prompt block has a hash of its own, so that none is found again."""
    used = 0
    with file.open("w", encoding="ascii") as text:
        for one in workload:
            blocks = -(-one.prompt_length // BLOCK)
            row = {
                "timestamp": one.arrival * 1e3,
                "input_length": one.prompt_length,
                "output_length": one.max_tokens,
                "hash_ids": list(range(used, used + blocks)),
            }
            used += blocks
            text.write(f"{json.dumps(row)}\n")
