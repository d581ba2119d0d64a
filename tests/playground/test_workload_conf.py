"""Every YAML of conf/workload builds its workload and says in its first line what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

FOLDER = Path(__file__).parents[2] / "conf" / "workload"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
OWN_FILE = {"azure_2024", "burstgpt", "qwen", "vllm", "aiperf", "saved", "sessions"}
WANTED = {
    *("azure_conv", "azure_code", "mooncake", "mooncake_synthetic", "agent_miniswe", "agent_multi", "servegen_reason"),
    *("servegen_chat", "sharegpt", "arxiv", "bwb", "poisson", "gamma", "constant", "closed_loop", "offline", "normal"),
    *("sharegpt_timed", *OWN_FILE),
}


def load(name: str) -> DictConfig:
    """The YAML, with a path where it wants one."""
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    if name in OWN_FILE:
        config["path" if "path" in list(config) else "trace"] = "/tmp/mine"
    return config


def test_the_list_is_complete() -> None:
    assert set(NAMES) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_yaml_builds_its_workload(name: str) -> None:
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")
    workload = instantiate(load(name))
    if name in OWN_FILE:
        return
    source = workload.source(seed=0)
    assert source.total
    assert source.take(1e9)


@pytest.mark.parametrize("name", sorted(WANTED - {"closed_loop"}))
def test_every_open_workload_takes_a_rate(name: str) -> None:
    assert instantiate(load(name), rate=3.0).rate == 3.0
