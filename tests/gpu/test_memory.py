"""What a model takes of a real GPU's memory, and the line that says so when it takes too much."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.cuda.memory import GRAPHS
from engine.errors import EngineError
from engine.kv import block_bytes
from engine.load import random_model

pytestmark = pytest.mark.gpu

SIZES = dict(block_size=16, max_seqs=8, max_tokens=256, max_length=512)


@pytest.fixture
def model():
    return random_model("tiny", "bfloat16", "cuda")


@pytest.fixture
def capped():
    """Lets this process have so many bytes more, and no more: what it asks for then fails as on a full device."""
    gc.collect()
    torch.cuda.empty_cache()

    def cap(more: int) -> None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def told(call, *parts):
    with pytest.raises(EngineError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return caught  # kept: what its frames held must be gone all the same


def test_the_report_adds_up(model):
    gc.collect()
    before = torch.cuda.memory_allocated()
    backend = CudaBackend(model, blocks=100, host_blocks=10, **SIZES)
    backend.now()
    memory = backend.memory
    block = block_bytes(model.shape, 16, model.dtype)
    assert memory.weights == model.shape.parameters * 2
    assert (memory.kv, memory.host) == (100 * block, 10 * block)
    assert memory.state > 0 and memory.activations > 0 and memory.graphs >= 0
    taken = torch.cuda.memory_allocated() - before
    assert memory.kv + memory.state <= taken <= memory.kv + memory.state + memory.graphs + (256 << 20)
    assert "GB" in str(memory)
    backend.close()
    del backend
    gc.collect()
    # Products keep their scratch, libraries their workspaces.
    assert torch.cuda.memory_allocated() <= before + (128 << 20)


def test_the_pool_takes_what_is_left(model):
    free, total = torch.cuda.mem_get_info()
    spare = 3 << 29  # others may take some of it meanwhile
    utilization = 1 - (free - GRAPHS - spare) / total
    sizes = SIZES | dict(max_length=16384, max_seqs=256)
    backend = CudaBackend(model, memory_utilization=utilization, **sizes)
    block = block_bytes(model.shape, 16, model.dtype)
    assert 0 < backend.spec.blocks * block <= spare < 256 * 16384 // 16 * block
    backend.close()


def test_too_small_a_share(model):
    told(
        lambda: CudaBackend(model, memory_utilization=1e-6, **SIZES),
        "backend.gpu_memory_utilization=1e-06:", "leaves no KV block", "raise it, lower limits.max_tokens",
    )  # fmt: skip


def test_too_large_a_model():
    told(lambda: random_model("llama-3.1-70b", "float32", "cuda:0"), "282.2 GB of weights", "do not fit the memory of")


def test_weights_that_do_not_fit_after_all(capped):
    before = torch.cuda.memory_allocated()
    capped(400 << 20)
    kept = told(lambda: random_model("qwen3-0.6b", "bfloat16", "cuda"), "1.2 GB of weights", "take a smaller model")
    assert torch.cuda.memory_allocated() == before and kept.value is not None


def test_a_pool_that_does_not_fit(model, capped):
    capped(200 << 20)
    told(lambda: CudaBackend(model, blocks=1 << 20, **SIZES), "kv.blocks=1048576: no memory for a KV pool")


def test_a_step_that_does_not_fit(capped):
    model = random_model("qwen3-0.6b", "bfloat16", "cuda")
    capped(60 << 20)
    sizes = SIZES | dict(max_tokens=32768, max_length=32768)
    told(lambda: CudaBackend(model, blocks=4, **sizes), "limits.max_tokens=32768: a step of so many tokens")


def test_graphs_that_do_not_fit(capped):
    model = random_model("qwen3-0.6b", "bfloat16", "cuda")
    backend = CudaBackend(model, blocks=40, **SIZES)
    gc.collect()
    torch.cuda.empty_cache()
    capped(0)
    told(backend.now, "no GPU memory left for", "lower kv.blocks")
    backend.close()


def test_heads_that_no_kernel_takes(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "head_dim": 512, "vocab_size": 64, "max_position_embeddings": 64}'
    )
    told(lambda: random_model(config, "bfloat16", "cuda"), "kernels.attention:", "triton: head size 512, at most 256")
