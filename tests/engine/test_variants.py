"""Every kind of model that the families' configs describe: float32 logits and greedy tokens are transformers'."""

import json

import pytest
import torch

from engine.config import find_config
from engine.cuda.backend import CudaBackend
from engine.kv import KvPool
from engine.load import load_model, random_model
from engine.models.decoder import Inputs
from engine.runner import Pools, Runner
from kernels.batch import DeviceBatch, PagedBatch
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host
from tests.engine.driver import Driver
from tests.engine.test_correctness import poisoned
from tests.engine.variants import VARIANTS, build

PROMPT = tuple((7 * position + 11) % 113 + 3 for position in range(40))
TOKENS = 16


@pytest.fixture(scope="module", params=list(VARIANTS))
def made(request, tmp_path_factory):
    """(folder, model of transformers)"""
    folder = tmp_path_factory.mktemp("variant") / "checkpoint"
    return folder, build(request.param, folder)


@pytest.fixture(scope="module")
def expected(made):
    _, theirs = made
    ids = torch.tensor([PROMPT])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens = out[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > TOKENS // 4, "the text repeats itself: equal tokens would prove little"
    return tokens


@torch.inference_mode()
def logits(model, pages):
    """Of all tokens of the prompt, on blocks in reverse order."""
    pool = poisoned(model, 10)
    positions = torch.arange(len(PROMPT))
    slots = (9 - positions // 4) * 4 + positions % 4
    return model(Inputs(torch.tensor(PROMPT), positions, slots, None, pages), pool)


TABLES = torch.arange(9, -1, -1)[None]


@torch.inference_mode()
def test_logits(made):
    folder, theirs = made
    wanted = theirs(torch.tensor([PROMPT])).logits[0]
    on_cpu = logits(load_model(folder), PagedBatch([0], [len(PROMPT)], TABLES, 4))
    torch.testing.assert_close(on_cpu, wanted, rtol=1e-4, atol=1e-4)
    ends = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    batch = DeviceBatch(0, ends[1:], TABLES.int(), ends, len(PROMPT))
    torch.testing.assert_close(logits(load_on_host(folder), batch), wanted, rtol=1e-4, atol=1e-4)


def test_tokens_on_the_cpu(made, expected):
    model = load_model(made[0])
    assert decoded(Driver(Runner(model, {0: Pools(poisoned(model))}), range(160), 4)) == expected


def test_tokens_as_on_a_gpu(made, expected):
    backend = CudaBackend(
        load_on_host(made[0]), blocks=40, block_size=4, max_seqs=2, max_tokens=64, max_length=100, graphs=False,
        timeline=HostTimeline(),
    )  # fmt: skip
    backend.now()
    backend._pool.data.fill_(float("nan"))
    assert decoded(BackendDriver(backend, range(40))) == expected
    backend.close()


def decoded(driver):
    """The prompt in chunks of 9."""
    live = driver.add(0, PROMPT, TOKENS)
    while live.computed < len(PROMPT):
        driver.run(driver.slice(0, min(9, len(PROMPT) - live.computed)))
    return driver.decode(0)[0]


WINDOWS = {
    "qwen2, last layers windowed": (None, 7, 7),
    "qwen2, all layers windowed": (7, 7, 7),
    "qwen2, window switched off": (None, None, None),
    "qwen3, a layer windowed": (None, 7, None),
    "mistral": (None, None, None),
    "mistral, windowed, wide heads": (7, 7, 7),
    "mistral, a layer windowed": (None, 7, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_by_layer(name, tmp_path):
    build(name, tmp_path)
    assert find_config(tmp_path).windows == WINDOWS[name]


def test_a_window_that_is_switched_off_is_none(tmp_path):
    """As Qwen's own configs say it; transformers writes null instead."""
    build("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | dict(sliding_window=7, max_window_layers=1)
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_config(tmp_path).windows == (None, None, None)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(use_sliding_window=True)))
    assert find_config(tmp_path).windows == (None, 7, 7)


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path):
    build("mistral, windowed, wide heads", tmp_path, sliding_window=128)
    assert find_config(tmp_path).windows == (None, None, None)


def test_shipped_windows():
    assert set(find_config("mistral-7b-v0.1").windows) == {4096}
    assert set(find_config("qwen2.5-7b").windows) == {None}


def test_normed_heads_that_rotate_in_part(tmp_path):
    """No class of transformers to compare with: norm, rotation and write in steps against all of it in one."""
    build("qwen3", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rope_theta"', '"partial_rotary_factor": 0.25, "rope_theta"'))
    assert find_config(tmp_path).rope.width == 8
    pages = PagedBatch([0], [len(PROMPT)], TABLES, 4)
    ends = torch.tensor([0, len(PROMPT)], dtype=torch.int32)
    batch = DeviceBatch(0, ends[1:], TABLES.int(), ends, len(PROMPT))
    torch.testing.assert_close(
        logits(load_model(tmp_path), pages), logits(load_on_host(tmp_path), batch), rtol=1e-4, atol=1e-4
    )


def test_kv_is_kept_in_full_whatever_windows_hide(tmp_path):
    build("qwen2, last layers windowed", tmp_path)
    model = random_model(tmp_path)
    assert KvPool(model.shape, 3, 4, model.dtype).data.shape == (3, 3, 4, 2, 2, 16)
