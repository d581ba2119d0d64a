"""Every YAML composes, and what it describes can be built."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import conf
from experiments import launcher, settings
from experiments.build import build
from experiments.overrides import completing

ROOT = Path(conf.__file__).parent
OPTIONS = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*.yaml") if path.parent != ROOT)
EXPERIMENTS = [option for option in OPTIONS if option.startswith("experiment/")]
# What an option needs besides: a pool that fits this machine, a model that fits the device, a cut that fits the model.
NEEDS = {
    "policy/placement/dynapipe": ["parallel=pp2", "parallel.spare_layers=1"],
    "policy/placement/weighted": ["parallel=pp2", "parallel.spare_layers=1"],
    "policy/align/prefill_delayer": ["parallel=dp_attention", "model=qwen3-30b-a3b", "device=h200"],
    "policy/overlap/single_batch": ["model=deepseek-v2-lite", "parallel=dp_attention"],
    **{
        f"policy/order/predictor/{name}": ["policy/order=srtf"]
        for name in ("max_tokens", "oracle", "log_normal", "rank_noise", "saturating")
    },
    "policy/overlap/row_chunks": ["parallel=tp4"],
    "backend/engine": ["model=tiny", "kv.blocks=100"],
    "backend/costed": ["model=tiny", "kv.blocks=100"],
    "backend/cost/calibrated": ["model=qwen3-8b", "device=h200"],
    "backend/cost/profiled": ["device=rtx4090"],
    "backend/cost/vidur": ["model=codellama-34b", "device=a100_80", "parallel=tp2"],
    "model/llama-2-70b": ["parallel=tp4"],
    "model/llama-3.1-70b": ["parallel=tp4"],
    "model/qwen2.5-72b": ["parallel=tp4"],
    "model/qwen2-57b-a14b": ["parallel=tp4"],
    "model/mixtral-8x7b": ["parallel=tp2"],
    **{
        f"model/{name}": ["parallel=tp8", "device=h200"]
        for name in ("qwen3-235b-a22b", "deepseek-v2", "deepseek-v3", "deepseek-v3.2")
    },
    **{f"model/{name}": ["parallel=tp8", "device=h200"] for name in ("kimi-k2", "glm-4.7")},
    "device/cpu": ["model=tiny"],
}


@pytest.fixture(autouse=True)
def hydra_ready():
    settings.register()
    launcher.register()
    with initialize_config_module("conf", version_base="1.3"):
        yield


def composed(*overrides: str):
    return completing(lambda given: compose("config", given), ["run_dir=nowhere", *overrides])


def chosen(option: str) -> str:
    group, _, name = option.rpartition("/")
    return f"+experiment={name}" if group == "experiment" else f"{group}={name}"


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in EXPERIMENTS])
def test_an_option_builds(option):
    config = composed(chosen(option), *NEEDS.get(option, []))
    if missing := OmegaConf.missing_keys(config):
        assert missing <= {"workload.path", "workload.trace", "backend.cost.path"}  # a file that only a user has
        return
    parts = build(settings.read(config))
    try:
        assert parts.source.due() >= 0
        assert parts.scheduler.spec == parts.backend.spec
    finally:
        parts.backend.close()


@pytest.mark.parametrize("option", EXPERIMENTS)
def test_the_runs_of_an_experiment_compose(option):
    config = composed(chosen(option))
    study = config.study
    if "policies" not in study:  # one run, not a comparison
        assert settings.read(config).policy
        return
    for part in [name for name in ("simulation", "idle", "engine") if name in study]:
        for policy in study.policies:
            assert settings.read(composed(*study[part], f"policy={policy}")).policy


def test_moving_to_the_engine_changes_nothing_but_the_backend():
    simulated, real = composed("policy=token_throttling"), composed("policy=token_throttling", "backend=engine")
    changed = {key for key in simulated if simulated[key] != real[key]}
    assert changed == {"backend"}


def test_defaults_live_in_the_schema_only():
    """A value in config.yaml would be a second place for a default."""
    text = (ROOT / "config.yaml").read_text()
    keys = [line.partition(":")[0] for line in text.splitlines() if line and line[0].isalpha()]
    assert keys == ["defaults", "run_dir", "hydra"]
