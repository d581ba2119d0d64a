"""How layers are split and how many KV blocks fit: by hand, against a real vLLM run, and when nothing fits."""

from dataclasses import replace

import pytest
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from playground.model import ModelShape
from playground.sim.capacity import Layout, even_layers, kv_blocks
from playground.sim.device import Device

MODEL = ModelShape("LlamaForCausalLM", 4, 8, 4, 2, 2, 16, 10)
DEVICE = Device("unit", 1000.0, 100.0, 10_000, 50.0, 20.0)


def device(name: str) -> Device:
    return instantiate(OmegaConf.load(f"conf/device/{name}.yaml"))


@given(st.integers(1, 128), st.integers(1, 128))
def test_even_layers_differ_by_one_at_most(layers, stages):
    if stages > layers:
        return
    split = even_layers(layers, stages)
    assert (sum(split), len(split)) == (layers, stages)
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


def test_weights_by_hand():
    layout = Layout.of(MODEL, tp=2, layers=(3, 1))
    # A layer has 592 parameters, a table 80; 2 bytes each, half on each rank.
    assert [layout.weight_bytes(stage) for stage in range(2)] == [3 * 592 + 80, 592 + 80]
    assert layout.kv_bytes_per_token(0) == 3 * 2 * 1 * 2 * 2  # one KV head a rank


def test_tied_tables_lie_on_both_ends():
    tied = replace(MODEL, tied_embeddings=True)
    assert Layout.of(tied).weight_bytes(0) == 4 * 592 * 2 + 160
    assert [Layout.of(tied, stages=2).weight_bytes(stage) for stage in range(2)] == [2 * 592 * 2 + 160] * 2


def test_blocks_by_hand():
    # 10,000 x 0.9 - 500 = 8500; weights 4 x 592 x 2 + 320 = 5056; a block of 4 tokens 4 x 64 = 256: 13.45.
    assert kv_blocks(MODEL, DEVICE, block_size=4, reserve_bytes=500) == 13
    # Stage 0 of (3, 1): (8500 - 3 x 1184 - 160) / (4 x 48) = 24.9; stage 1: (8500 - 1184 - 160) / 64 = 111.8.
    assert kv_blocks(MODEL, DEVICE, layers=(3, 1), block_size=4, reserve_bytes=500) == 24


def test_blocks_of_vllm_on_an_rtx_4090():
    """LLMServingSim's run of vLLM 0.19 recorded 2588 for Llama-3.1-8B at 0.9."""
    assert kv_blocks(ModelShape.read("llama-3.1-8b"), device("rtx4090")) == pytest.approx(2588, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"utilization": 1.5}, r"utilization=1\.5 must lie in \(0, 1\]"),
        ({"reserve_bytes": -1}, "reserve_bytes=-1 must be 0 or more"),
        ({"reserve_bytes": 3900, "block_size": 16}, "no room for one KV block of 16 tokens; raise tp or stages"),
        (
            {"reserve_bytes": 8000},
            r"stage 0 needs 0\.0 GB before any KV \(tp=1, layers=\[4\]\): raise tp or the number",
        ),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message) as error:
        kv_blocks(MODEL, DEVICE, **options)
    assert "\n" not in str(error.value)
