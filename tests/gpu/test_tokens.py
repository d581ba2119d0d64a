"""Greedy float32 tokens of every kind of model equal those of transformers, whatever the policy does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from playground.core import Request, Sampling
from playground.draft import How
from playground.rank import hash_tokens
from tests.engine.variants import build
from tests.gpu.serving import SIZE, backend_for, load, policy, served

pytestmark = pytest.mark.gpu

MODELS = (
    "llama, llama3",
    "llama, wide heads, one of keys, tied",
    "qwen2, last layers windowed",
    "qwen3",
    "deepseek_v2, queries not compressed",
    "deepseek_v3",
    "mistral, windowed, wide heads",
    "half of a head rotates",
)

TIGHT = dict(blocks=24)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "graphs": ({}, dict(ahead=1)),
    "graphs, two ahead": ({}, dict(ahead=2)),
    "no graphs, chunks": (dict(graphs=False), dict(tokens=16, ahead=1)),
    "no graphs, chunks, two ahead": (dict(graphs=False), dict(tokens=16, ahead=2)),
    "recompute": (dict(graphs=False, **TIGHT), dict(ahead=1)),
    "recompute, graphs, two ahead": (TIGHT, dict(ahead=2)),
    "swap, two ahead": (dict(graphs=False, host_blocks=64, **TIGHT), dict(how=How.SWAP, ahead=2)),
    "prefix cache": (dict(graphs=False), dict(tokens=48, ahead=1)),
}
"""Options of the backend and of the policy."""


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory):
    """(our model on the GPU, theirs on the CPU, requests, theirs' tokens by request)"""
    folder = tmp_path_factory.mktemp("variant") / "checkpoint"
    theirs = build(request.param, folder)
    requests = conversations()
    return load(folder), theirs, requests, {each.id: generated(theirs, each) for each in requests}


def conversations() -> list[Request]:
    """Prompts of many lengths, every third with the same beginning."""
    random = torch.Generator().manual_seed(7)
    shared = torch.randint(3, 120, (24,), generator=random).tolist()
    requests = []
    for id in range(9):
        own = torch.randint(3, 120, (1 + 6 * id,), generator=random).tolist()
        prompt = tuple((shared if id % 3 == 0 else []) + own)
        requests.append(
            Request(
                id, 0.0, len(prompt), 12 + id, prompt=prompt, hashes=hash_tokens(prompt, SIZE), hash_block=SIZE,
                sampling=Sampling(ignore_eos=True),
            )
        )  # fmt: skip
    return requests


def generated(theirs, request: Request) -> list[int]:
    ids = torch.tensor([request.prompt])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def differing(theirs, request: Request, found: list[int], wanted: list[int]) -> bool:
    """Whether tokens differ by more than a tie: float32 on two devices may break one in two ways."""
    place = next((place for place, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return False
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*request.prompt, *wanted[:place]]])).logits[0, -1]
    return bool(logits[wanted[place]] - logits[found[place]] > 1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_tokens(made, way):
    model, theirs, requests, wanted = made
    options, rules = WAYS[way]
    backend = backend_for(model, **options)
    found = served(backend, requests, policy(**rules), prefix_cache=way == "prefix cache")
    backend.close()
    assert [each.id for each in requests if differing(theirs, each, found.tokens[each.id], wanted[each.id])] == []
    assert not options.get("blocks") or found.preemptions
    assert way != "prefix cache" or found.cached
