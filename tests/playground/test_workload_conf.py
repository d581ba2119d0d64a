"""Every YAML of conf/workload builds its workload and says in its first line what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

FOLDER = Path(__file__).parents[2] / "conf" / "workload"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
OWN_FILE = {"azure_2024", "burstgpt", "qwen", "vllm", "aiperf", "saved", "sessions"}
WANTED = {
    *("azure_conv", "azure_code", "mooncake", "mooncake_synthetic", "agent_miniswe", "agent_multi", "servegen_reason"),
    *("servegen_chat", "sharegpt", "arxiv", "bwb", "poisson", "gamma", "constant", "closed_loop", "offline"),
    *("sharegpt_timed", *OWN_FILE),
}


def test_the_list_is_complete() -> None:
    assert set(NAMES) == WANTED


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_builds_its_workload(name: str) -> None:
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")
    if name in OWN_FILE:
        config.update({"path" if "path" in list(config) else "trace": "/tmp/mine"})
        assert instantiate(config).format
        return
    source = instantiate(config).source(seed=0)
    assert source.total
    assert source.take(1e9)


@pytest.mark.parametrize("name", sorted(WANTED - {"closed_loop"}))
def test_the_rate_can_be_swept(name: str) -> None:
    assert "rate" in OmegaConf.load(FOLDER / f"{name}.yaml")
