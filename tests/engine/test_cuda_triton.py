"""The CUDA backend with the kernels that a GPU runs, in Triton's interpreter: each takes what the other gives."""

from dataclasses import replace

import pytest
import torch

from engine.config import read_config
from engine.cuda.backend import CudaBackend
from engine.models.decoder import Decoder
from engine.tiny import tiny
from engine.weights import read_weights
from kernels.registry import select
from kernels.triton.activation import embedding
from kernels.triton.attention import Attention
from kernels.triton.linear import tuned
from kernels.triton.qkv import place_qkv
from kernels.triton.sampling import pick
from playground.core import Sampling
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host

DRAWN = Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5, ignore_eos=True)


def interpreted(folder):
    """A decoder whose every operation is Triton's."""
    config, made = read_config(folder), tuned()
    weights = read_weights(folder, config.shape, torch.float32, "cpu")
    ops = replace(
        select("cpu"), attention=Attention, place_qkv=place_qkv, pick=pick, embedding=embedding,
        norm_linear=made.norm_linear, norm_gated=made.norm_gated, add_linear=made.add_linear,
    )  # fmt: skip
    model = Decoder(config, weights, ops)
    model._embed = embedding
    return model


def answers(model, graphs):
    """A prompt in two chunks, one drawn from, and swaps, in steps of all kinds; then decodes of everybody."""
    backend = CudaBackend(
        model, blocks=40, block_size=4, host_blocks=8, max_seqs=4, max_tokens=64, max_length=64, graphs=graphs,
        timeline=HostTimeline(),
    )  # fmt: skip
    if graphs:
        backend._graphs._tokens = (24,)
        backend._graphs.capture_all = lambda picking: None
    backend.now()
    backend._pool.data.fill_(float("nan"))
    driver = BackendDriver(backend, range(40), range(8))
    for id, prompt in enumerate((range(5, 16), (7, 8, 9), range(40, 60))):
        driver.add(id, tuple(prompt), 3, DRAWN if id == 1 else None)
    driver.run(driver.slice(0), driver.slice(2, 7))
    driver.run(driver.slice(1), driver.slice(2, 1), driver.swap_out(0))
    driver.run(driver.slice(1), driver.slice(2), driver.swap_in(0))
    tokens = driver.decode(0, 1, 2)
    backend.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "graphs"), [("qwen3", True), ("qwen2", False)])
def test_tokens_are_those_of_the_reference(architecture, graphs):
    folder = tiny(architecture)
    assert answers(interpreted(folder), graphs) == answers(load_on_host(folder), graphs)
