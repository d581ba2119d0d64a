"""Two ranks on GPUs give the tokens of one: on GPUs of their own, or both on the only one there is."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.load import load_model, random_model
from engine.parallel.backend import ParallelBackend
from engine.parallel.config import WorkerConfig
from engine.parallel.launch import spawned
from engine.parallel.layout import Layout
from engine.tiny import tiny
from playground.backend import Backend
from playground.core import Request, Sampling
from tests.gpu.serving import DEVICE, SIZE, policy, served
from tests.gpu.test_tokens import conversations

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = dict(blocks=24, block_size=SIZE, max_seqs=8, max_tokens=256, max_length=120)
"""So few blocks that sequences are preempted."""

SHARE = torch.cuda.device_count() < 2


def spread(path: Path, layout: Layout, folder: Path, graphs: bool, **more: Any) -> ParallelBackend:
    config = WorkerConfig(
        str(path), layout, f"file://{folder / 'meet'}", device=DEVICE, share_gpus=SHARE,
        sizes=SIZES | {"graphs": graphs}, **more,
    )  # fmt: skip
    return ParallelBackend(config, spawned(layout.ranks))


def workload() -> list[Request]:
    """Greedy and random ones by turns."""
    return [
        replace(one, sampling=Sampling(temperature=0.8 * (one.id % 2), seed=one.id, ignore_eos=True))
        for one in conversations()
    ]


def tokens(backend: Backend) -> dict[int, list[int]]:
    found = served(backend, workload(), policy(64, ahead=1), prefix_cache=True)
    assert found.preemptions
    return found.tokens


@pytest.fixture(scope="module")
def expected():
    with closing(CudaBackend(load_model(tiny("llama"), "float32", DEVICE), **SIZES)) as backend:
        return tokens(backend)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("layout", [Layout(stages=2), Layout(tp=2)], ids=["pp2", "tp2"])
def test_tokens_are_those_of_one_rank(expected, layout, graphs, tmp_path):
    with closing(spread(tiny("llama"), layout, tmp_path, graphs)) as backend:
        assert tokens(backend) == expected


@pytest.fixture(scope="module")
def mixed_experts():
    with closing(CudaBackend(load_model(tiny("qwen2-moe"), "float32", DEVICE), **SIZES)) as backend:
        return tokens(backend)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(replicas=2, lockstep=True, ep=2),
        Layout(replicas=2, lockstep=True, ep=2, exchange="padded_all_to_all"),
        Layout(replicas=2, lockstep=True),
        Layout(tp=2, ep=2, exchange="padded_all_to_all"),
    ],
    ids=["gather", "all_to_all", "parts", "team"],
)
def test_experts_on_both_ranks_give_the_tokens_of_one(mixed_experts, layout, graphs, tmp_path):
    with closing(spread(tiny("qwen2-moe"), layout, tmp_path, graphs)) as backend:
        assert tokens(backend) == mixed_experts


@pytest.fixture
def few_layers(tmp_path) -> Path:
    """Qwen3-0.6B with four layers."""
    config = json.loads(files("playground").joinpath("models", "qwen3-0.6b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return path


def test_a_pipeline_in_bfloat16(few_layers, tmp_path):
    """Stages do what the whole does, to the bit, as long as they do it in the same batches: one request at a time."""
    requests = [replace(one, sampling=Sampling(ignore_eos=True)) for one in conversations()]
    runs = []
    with closing(CudaBackend(random_model(few_layers, "bfloat16", DEVICE), **SIZES)) as backend:
        runs.append([served(backend, [one], policy(64)).tokens for one in requests])
    pipeline = spread(few_layers, Layout(stages=2, layers=(1, 3)), tmp_path, True, weights="random", dtype="bfloat16")
    with closing(pipeline) as backend:
        runs.append([served(backend, [one], policy(64)).tokens for one in requests])
    assert runs[0] == runs[1]
