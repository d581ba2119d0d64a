"""The CUDA backend with the kernels that a GPU runs, in Triton's interpreter: each takes what the other gives."""

from dataclasses import replace
from functools import partial

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
from kernels.triton.experts import Experts
from kernels.triton.latent import MlaAttention, place_latent
from kernels.triton.linear import tuned
from kernels.triton.qkv import place_qkv
from kernels.triton.routing import route
from kernels.triton.sampling import count_tokens, logprobs, pick
from playground.core import Sampling
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host

DRAWN = Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=5, ignore_eos=True)
RARE = (
    Sampling(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0, logprobs=0, ignore_eos=True),
    Sampling(temperature=1.5, min_p=0.05, repetition_penalty=1.3, seed=5, logprobs=3, ignore_eos=True),
    Sampling(logprobs=2, ignore_eos=True),
)


def interpreted(folder):
    """A decoder whose every operation is Triton's."""
    config, made = read_config(folder), tuned()
    weights = read_weights(folder, config.shape, torch.float32, "cpu")
    ops = replace(
        select("cpu"), attention=Attention, place_qkv=place_qkv, pick=pick, embedding=embedding,
        count_tokens=count_tokens, logprobs=logprobs, route=route, experts=Experts,
        mla_attention=MlaAttention, place_latent=place_latent,
        norm_linear=made.norm_linear, norm_gated=made.norm_gated, add_linear=made.add_linear,
    )  # fmt: skip
    model = Decoder(config, weights, ops)
    model._embed = partial(embedding, table=weights.embedding)
    return model


def driver_of(model, graphs):
    backend = CudaBackend(
        model, blocks=40, block_size=4, host_blocks=8, max_seqs=4, max_tokens=64, max_length=64, graphs=graphs,
        timeline=HostTimeline(),
    )  # fmt: skip
    if graphs:
        backend._graphs._tokens = (24,)
        backend._graphs.capture_all = lambda picking: None
    backend.now()
    backend._pool.data.fill_(float("nan"))
    return BackendDriver(backend, range(40), range(8))


def answers(model, graphs):
    """A prompt in two chunks, one drawn from, and swaps, in steps of all kinds; then decodes of everybody."""
    driver = driver_of(model, graphs)
    for id, prompt in enumerate((range(5, 16), (7, 8, 9), range(40, 60))):
        driver.add(id, tuple(prompt), 3, DRAWN if id == 1 else None)
    driver.run(driver.slice(0), driver.slice(2, 7))
    driver.run(driver.slice(1), driver.slice(2, 1), driver.swap_out(0))
    driver.run(driver.slice(1), driver.slice(2), driver.swap_in(0))
    tokens = driver.decode(0, 1, 2)
    driver.backend.close()
    return tokens


def rare_answers(model):
    """Tokens and logprobs, after a chunk that samples nothing and a preemption."""
    driver = driver_of(model, graphs=False)
    for id, sampling in enumerate(RARE):
        driver.add(id, (7, 8, 7, 9, 8), 6, sampling)
    driver.run(driver.slice(1, 2))
    driver.run(*(driver.slice(id) for id in range(3)))
    driver.preempt(0)
    tokens = driver.decode(0, 1, 2)
    driver.backend.close()
    return tokens, [told for live in driver.live.values() for told in live.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "graphs"), [("qwen3", True), ("qwen2-moe", False), ("deepseek-v3", False)])
def test_tokens_are_those_of_the_reference(architecture, graphs):
    folder = tiny(architecture)
    assert answers(interpreted(folder), graphs) == answers(load_on_host(folder), graphs)


@pytest.mark.slow
def test_rare_options_are_those_of_the_reference():
    folder = tiny("llama")
    tokens, told = rare_answers(interpreted(folder))
    expected, wanted = rare_answers(load_on_host(folder))
    assert tokens == expected
    assert len(told) == 18
    for ours, theirs in zip(told, wanted, strict=True):
        assert ours.value == pytest.approx(theirs.value, abs=1e-4)
        assert [id for id, _ in ours.top] == [id for id, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)
