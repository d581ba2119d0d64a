"""Shares of a model compute what the whole does, with real processes over Gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import find_config
from engine.errors import EngineError
from engine.kv import KvPool
from engine.load import load_model, random_model
from engine.models.decoder import Inputs
from engine.parallel.layout import Layout, Place, local_config
from engine.shard import Cut
from engine.tiny import tiny
from engine.weights import read_weights
from kernels.batch import PagedBatch
from tests.engine.parallel.ranks import logits

IDS = [5, 17, 3, 99, 41, 7, 23]
CHUNKS = [(0, IDS[:4]), (4, IDS[4:])]


def alone(model) -> torch.Tensor:
    pool = KvPool(model.shape, 8, 4, torch.float32)
    positions = torch.arange(len(IDS))
    pages = PagedBatch([0], [len(IDS)], torch.arange(8)[None], 4)
    with torch.inference_mode():
        return model(Inputs(torch.tensor(IDS), positions, positions, torch.tensor([len(IDS) - 1]), pages), pool)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tp": 2}),
        ("qwen2", {"tp": 4}),
        ("qwen3", {"stages": 2, "tp": 2}),
        ("qwen2", {"stages": 3}),
        ("qwen2-moe", {"tp": 2}),
        ("deepseek-v3", {"stages": 2, "tp": 2}),
        ("deepseek-v2", {"tp": 2}),
    ],
    ids=str,
)
def test_logits_are_those_of_one_rank(family, layout):
    """Every rank of the last stage has them all; earlier stages have none. Qwen2 has biases, Qwen3 norms of heads.

    Qwen2-MoE has an MLP and experts by turns, some of them shared by all tokens; DeepSeek's queries are compressed, or,
    in V2-Lite, not.
    """
    expected = alone(load_model(tiny(family)))
    tp = layout.get("tp", 1)
    found = logits(tiny(family), CHUNKS, layout)
    for got in found[-tp:]:
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)
        assert torch.tensor(got).argmax() == expected.argmax()
    assert all(got == [] for got in found[:-tp])


HELP = [(0, [3, 1]), (2, [])]
"""Of a replica that is done sooner: it goes on helping."""


@pytest.mark.parametrize(
    ("family", "layout", "exchange"),
    [
        ("qwen2-moe", {"replicas": 2, "ep": 2}, "all_gather"),
        ("qwen2-moe", {"replicas": 2, "ep": 2}, "padded_all_gather"),
        ("deepseek-v3", {"replicas": 2, "tp": 2, "ep": 4}, "all_to_all"),
        ("deepseek-v3", {"replicas": 2, "tp": 2, "ep": 4}, "padded_all_to_all"),
        ("qwen3-moe", {"tp": 2, "ep": 2}, "all_gather"),
        ("qwen3-moe", {"tp": 2, "ep": 2}, "padded_all_to_all"),
    ],
    ids=str,
)
def test_experts_on_other_ranks_add_what_they_would_here(family, layout, exchange):
    """Of prompts of unequal length, while another replica has nothing to do any more; or within a team."""
    expected = alone(load_model(tiny(family)))
    tp, lockstep = layout.get("tp", 1), layout.get("replicas", 1) > 1
    found = logits(
        tiny(family), [HELP, CHUNKS] if lockstep else CHUNKS, layout | {"exchange": exchange, "lockstep": lockstep}
    )
    for got in found[-tp:]:
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)
    assert not lockstep or all(got == [] for got in found[:-tp])


@pytest.mark.parametrize("layout", [{"replicas": 2, "tp": 2, "ep": 2}, {"replicas": 2, "stages": 2}], ids=str)
def test_parts_of_the_same_experts_are_gathered_for(layout):
    expected = alone(load_model(tiny("qwen3-moe")))
    found = logits(tiny("qwen3-moe"), [HELP, CHUNKS], layout | {"lockstep": True})
    torch.testing.assert_close(torch.tensor(found[-1]), expected, rtol=1e-4, atol=1e-4)


def test_random_weights_are_those_of_one_rank_whatever_the_layout():
    expected = alone(random_model(tiny("llama"), "float32"))
    got = logits(tiny("llama"), CHUNKS, {"stages": 2, "layers": [3, 1]}, random=True)[-1]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)


# --- cuts


def cut(family, rank, size):
    config = find_config(tiny(family))
    whole = read_weights(tiny(family), config.shape, torch.float32, "cpu")
    keep = Cut(config.shape, range(config.shape.layers), rank, size)
    return whole, keep, config.shape


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_heads_and_a_bias_is_added_once(size):
    for rank in range(size):
        whole, keep, shape = cut("qwen2", rank, size)
        layer, full = keep.layer(whole.layers[0]), whole.layers[0]
        width = shape.query_width // size
        assert torch.equal(layer.qkv.weight[:width], full.qkv.weight[rank * width : (rank + 1) * width])
        held = max(shape.kv_heads // size, 1) * shape.head_dim
        assert len(layer.qkv.weight) == width + 2 * held
        assert torch.equal(layer.out.weight, full.out.weight[:, rank * width : (rank + 1) * width])
        inner = shape.intermediate // size
        up = full.gate_up.weight[shape.intermediate :]
        assert torch.equal(layer.gate_up.weight[inner:], up[rank * inner : (rank + 1) * inner])
        assert (layer.out.bias is None) or rank == 0


def test_ranks_share_each_expert_and_have_the_whole_router():
    whole, keep, shape = cut("qwen3-moe", 1, 4)
    full, part = whole.layers[1].experts, keep.layer(whole.layers[1]).experts
    width, each = shape.experts.intermediate, shape.experts.intermediate // 4
    assert torch.equal(part.gate_up[:, each:], full.gate_up[:, width + each : width + 2 * each])
    assert torch.equal(part.down, full.down[:, :, each : 2 * each])
    assert torch.equal(part.router, full.router)
    assert keep.layer(whole.layers[0]).experts is None and keep.layer(whole.layers[1]).gate_up is None


def test_a_stage_counts_its_dense_layers_from_its_first():
    config = find_config(tiny("qwen2-moe"))  # layers 0 and 2 are dense
    local = local_config(config, Layout(stages=2, layers=(1, 3)), Place(0, 1, 0)).shape
    assert [local.has_experts(layer) for layer in range(3)] == [True, False, True]
    half = local_config(config, Layout(tp=2), Place(0, 0, 1)).shape.experts
    assert (half.count, half.intermediate, half.shared) == (6, 32, 64)
    with pytest.raises(EngineError, match=r"parallel: 8 ranks cannot share the model's 100 experts\.intermediate"):
        uneven = replace(config.shape.experts, intermediate=100)
        local_config(replace(config, shape=replace(config.shape, experts=uneven)), Layout(tp=8), Place(0, 0, 0))


def test_a_vocabulary_that_does_not_divide_is_filled_with_zeros():
    keep = Cut(find_config(tiny("llama")).shape, range(4), 2, 3)
    assert keep.vocabulary(torch.arange(8.0).view(4, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    keep = Cut(find_config(tiny("llama")).shape, range(4), 1, 3)
    assert keep.vocabulary(torch.arange(8.0).view(4, 2)).tolist() == [[4.0, 5.0], [6.0, 7.0]]


# --- layouts


def test_ranks_are_numbered_by_replica_stage_and_tensor_parallel_rank():
    layout = Layout(stages=2, tp=3, replicas=2)
    places = [layout.place(rank) for rank in range(layout.ranks)]
    assert places[7] == Place(1, 0, 1) and places[4] == Place(0, 1, 1)
    assert [layout.rank(place) for place in places] == list(range(12))
    assert layout.named(7) == "rank 7 (replica 1, stage 0, tp_rank 1)" and Layout().named(0) == "rank 0"


def test_layers_are_dealt_out_evenly_or_as_told():
    assert Layout(stages=3).cut(8) == (3, 3, 2)
    assert Layout(stages=2, layers=(5, 3)).span(1, 8) == range(5, 8)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (dict(tp=3), r"parallel\.tp=3 does not divide the model's \d+ heads"),
        (dict(stages=9), r"parallel\.stages=9: the model has 4 layers"),
        (dict(stages=2, layers=(2, 1)), r"parallel\.layers=\[2, 1\] must give each of 2 stages"),
        (dict(tp=0), r"parallel\.tp=0 must be at least 1"),
        (dict(tp=2, ep=3), r"parallel\.ep=3 must divide the 2 ranks that share experts"),
        (dict(tp=2, ep=2), r"parallel\.ep=2: the model has no experts"),
        (dict(tp=2, exchange="all_to_all"), r"parallel\.exchange=all_to_all needs experts of its own .*\.ep=2"),
        (dict(exchange="post"), r"parallel\.exchange=post must be one of all_gather, "),
    ],
)
def test_sizes_that_do_not_divide_are_told(layout, told):
    with pytest.raises(EngineError, match=told):
        local_config(find_config(tiny("llama")), Layout(**layout), Place(0, 0, 0))
