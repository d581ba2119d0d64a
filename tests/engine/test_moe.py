"""Mixtures of experts: what the checkpoint says of them, and what the decoder makes of it; see also `test_variants`."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Routing, find_config
from engine.errors import EngineError
from engine.load import load_model
from engine.models.moe import Mixture
from engine.tiny import tiny
from engine.weights import random_weights, read_weights
from kernels.registry import Need, available, select


def weights(family):
    folder = tiny(family)
    return read_weights(folder, find_config(folder).shape, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe"])
def test_weights_are_as_many_as_the_shape_says(family):
    shape = find_config(tiny(family)).shape
    for made in (weights(family), random_weights(shape, torch.float32, "cpu")):
        for index, layer in enumerate(made.layers):
            assert (layer.experts is not None) == shape.has_experts(index)
            if layer.experts is None:
                continue
            parts = [*layer.experts, *(linear.weight for linear in (layer.gate_up, layer.down) if linear)]
            elements = sum(part.numel() for part in parts if part is not None)
            assert elements == shape.common_weights + shape.experts.count * shape.expert_weights


def test_gates_lie_over_ups():
    tensors, experts = load_file(tiny("qwen3-moe") / "model.safetensors"), weights("qwen3-moe").layers[2].experts
    prefix = "model.layers.2.mlp.experts.5"
    assert torch.equal(experts.gate_up[5, :64], tensors[f"{prefix}.gate_proj.weight"])
    assert torch.equal(experts.gate_up[5, 64:], tensors[f"{prefix}.up_proj.weight"])
    assert torch.equal(experts.down[5], tensors[f"{prefix}.down_proj.weight"])


def test_shared_experts_without_a_gate_count_in_full():
    """As DeepSeek has them: the gate that lets everything through."""
    layer = weights("qwen2-moe").layers[1]
    y, x, routing = torch.randn(3, 128), torch.zeros(3, 128), Routing(2, False)
    ops = select("cpu")
    experts = layer.experts._replace(shared_gate=None)
    both = Mixture(experts, layer.gate_up, layer.down, ops, routing).add(y, x.clone())
    own = Mixture(experts, None, None, ops, routing).add(y, x.clone())
    common = ops.add_linear(*layer.down)(ops.silu_mul(ops.linear(*layer.gate_up)(y)), x.clone())
    torch.testing.assert_close(both, own + common, rtol=1e-4, atol=1e-5)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny("qwen3-moe"), tmp_path / "checkpoint")


def refused(folder, *said):
    with pytest.raises(EngineError) as told:
        load_model(folder)
    assert all(part in str(told.value) for part in said) and "\n" not in str(told.value)


def test_an_expert_that_is_missing_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.experts.7.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "tensor model.layers.3.mlp.experts.7.up_proj.weight is missing")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_topk_prob": 1}, "field norm_topk_prob=1 must be true or false"),
        ({"num_experts": 7}, "mlp.gate.weight has shape [8, 128], config.json asks for [7, 128]"),
        ({"num_experts_per_tok": 9}, "model.experts.active=9 must lie in 1..8"),
        ({"moe_intermediate_size": 32}, "gate_proj.weight has shape [64, 128], config.json asks for [32, 128]"),
        ({"mlp_only_layers": [0, 1]}, "tensor model.layers.1.mlp.down_proj.weight is missing"),
    ],
)
def test_a_config_that_does_not_fit(folder, changes, said):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refused(folder, said)


def test_shares_add_up_to_one_only_if_the_config_says_so(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert find_config(folder).routing == Routing(4, True)
    del config["norm_topk_prob"]
    path.write_text(json.dumps(config))
    assert find_config(folder).routing == Routing(4, False)
    assert find_config("qwen3-8b").routing is None


def test_operations_are_chosen_for_so_many_experts(monkeypatch):
    needs = []
    monkeypatch.setattr("engine.load.select", lambda device, kernels, need: needs.append(need) or select(device))
    for family in ("qwen3-moe", "qwen3"):
        load_model(tiny(family))
    assert [need.experts for need in needs] == [8, None]


def test_more_experts_than_kernels_hold_are_the_references(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    pytest.importorskip("triton")
    assert available("experts", "cuda", Need(experts=1024))[-1] == "triton"
    assert available("experts", "cuda", Need(experts=1025)) == ("reference",)
