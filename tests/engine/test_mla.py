"""Latent attention and DeepSeek's routing: what configs and checkpoints say, what is cached. See `test_variants`."""

import json

import pytest
import torch

from engine.config import Grouped, Routing, find_config
from engine.errors import EngineError
from engine.kv import KvPool, block_bytes
from engine.load import load_model
from engine.models import mla
from engine.models.routing import pick_experts
from engine.tiny import tiny
from engine.weights import in_halves, random_weights, read_weights
from kernels.batch import DeviceBatch, PagedBatch
from kernels.registry import select
from playground.model import ModelShape

FAMILIES = ("deepseek-v2", "deepseek-v3")


# --- the cache


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "moonlight-16b-a3b"])
def test_the_cache_holds_what_the_simulator_counts(name):
    shape = ModelShape.read(name)
    assert block_bytes(shape, 16, torch.bfloat16) == 16 * shape.kv_bytes_per_token
    assert block_bytes(shape, 16, torch.bfloat16) == shape.layers * 16 * 576 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_is_as_large_as_its_blocks(family):
    shape = find_config(tiny(family)).shape
    pool = KvPool(shape, 5, 4, torch.float32)
    assert pool.data.shape == (4, 5, 4, 72)
    assert pool.data.nbytes == 5 * block_bytes(shape, 4, torch.float32) == 20 * shape.kv_bytes_per_token


# --- weights


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_as_many_as_the_shape_says(family):
    shape = find_config(tiny(family)).shape
    for made in (read_weights(tiny(family), shape, torch.float32, "cpu"), random_weights(shape, torch.float32, "cpu")):
        for layer in made.layers:
            matrices = (layer.latent.down.weight, layer.latent.queries, layer.latent.keys, layer.latent.values)
            elements = sum(part.numel() for part in (*matrices, layer.out.weight) if part is not None)
            assert elements == shape.attention_weights
            assert layer.qkv is None


def test_rotating_neighbours_are_put_into_halves():
    """Of two heads of six rows, the last four of each."""
    rows = torch.arange(12.0)[:, None]
    assert in_halves(rows, 2, 4).flatten().tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]


# --- which chunks are expanded


def flat(*slices):
    starts, lengths = ([part[i] for part in slices] for i in (0, 1))
    return PagedBatch(starts, lengths, torch.zeros(len(slices), 9, dtype=torch.int64), 4)


def test_first_chunks_alone_are_expanded():
    ops = select("cpu")
    assert mla.first_chunks(flat((5, 1), (9, 1), (0, 3), (0, 4)), ops).rows == slice(2, 9)
    assert mla.first_chunks(flat((5, 1), (4, 3), (0, 4)), ops) is None
    assert mla.first_chunks(flat((5, 1), (0, 1)), ops) is None


def test_what_the_host_does_not_know_is_not_expanded():
    """As in a graph, which serves many batches."""
    ends = torch.tensor([0, 3], dtype=torch.int32)
    tables = torch.zeros(1, 2, dtype=torch.int32)
    assert mla.first_chunks(DeviceBatch(0, ends[1:], tables, ends, 3), select("cpu")) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("singles", [0, 2])
@torch.inference_mode()
def test_expanded_or_absorbed_is_the_same(family, singles, monkeypatch):
    model = load_model(tiny(family))
    batch = flat(*[(4 * row + 5, 1) for row in range(singles)], (0, 7), (0, 12))
    batch.tables.copy_(torch.arange(batch.tables.numel()).view_as(batch.tables))
    positions = torch.cat([torch.arange(s, s + n) for s, n in batch.spans])
    rows = torch.repeat_interleave(torch.arange(len(batch.starts)), torch.tensor(batch.lengths))
    slots = batch.tables[rows, positions // 4] * 4 + positions % 4
    x, results = torch.randn(len(slots), 128, generator=torch.Generator().manual_seed(1)), []
    for first_chunks in (mla.first_chunks, lambda pages, ops: None):
        monkeypatch.setattr(mla, "first_chunks", first_chunks)
        kv = torch.randn(batch.tables.numel(), 4, 72, generator=torch.Generator().manual_seed(2))
        results.append(model._attention.of(batch, positions, slots)(1, x, kv))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- routing

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 1.9, 3.0, -9.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])


def picks(grouped, correction=None, normalise=False, active=2):
    shares, ids = pick_experts(LOGITS, Routing(active, normalise, grouped), grouped, correction)
    return shares, ids.tolist()


def test_the_likeliest_of_all():
    shares, ids = picks(Grouped(1, 1, 1, False, 2.0))
    assert ids == [[4, 0], [0, 1]]  # equals by id
    torch.testing.assert_close(shares, 2 * LOGITS.softmax(-1).gather(1, torch.tensor(ids)))


def test_only_from_the_best_group():
    """Of three groups of two, the third has the best expert; by its best two the first one wins."""
    assert picks(Grouped(3, 1, 1, False, 1.0))[1][0] == [4, 5]
    assert picks(Grouped(3, 1, 2, True, 1.0))[1][0] == [0, 1]


def test_a_correction_decides_and_is_not_part_of_the_shares():
    correction = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 0.0])
    shares, ids = picks(Grouped(1, 1, 2, True, 2.5), correction, normalise=True)
    assert ids[0] == [2, 4]
    scores = LOGITS[0, [2, 4]].sigmoid()
    torch.testing.assert_close(shares[0], 2.5 * scores / scores.sum())


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=true is not supported in a DeepSeek-V2"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc is not supported; this family has greedy"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func=softmax is not supported; this family has sigmoid"),
        ("deepseek-v3", {"n_group": 3}, "n_group=3, topk_group=2: 3 of 8 experts cannot be picked"),
        ("deepseek-v3", {"topk_group": 1}, "n_group=4, topk_group=1: 3 of 8 experts cannot be picked"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave=false is not supported"),
    ],
)
def test_what_the_engine_cannot_do_is_told(family, change, told, tmp_path):
    config = json.loads((tiny(family) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=told):
        find_config(tmp_path)
