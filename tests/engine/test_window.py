"""Mistral's sliding window: the same tokens as transformers, on the CPU's path and on the GPU's."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import find_config
from engine.cuda.backend import CudaBackend
from engine.load import load_model
from engine.runner import Pools, Runner
from engine.tiny import tiny
from tests.engine.cuda_host import BackendDriver, HostTimeline, load_on_host
from tests.engine.driver import Driver
from tests.engine.test_correctness import poisoned

WINDOW = 12
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("mistral") / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    config |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert theirs.config.sliding_window == WINDOW
    ids = torch.tensor([PROMPT])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(PROMPT) :].tolist()


def test_config(folder):
    assert set(find_config(folder).windows) == {WINDOW}
    assert set(find_config("mistral-7b").windows) == {None}


@pytest.mark.parametrize("chunk", [7, 40])
def test_on_the_cpu(folder, expected, chunk):
    model = load_model(folder)
    driver = Driver(Runner(model, {0: Pools(poisoned(model))}), range(160), 4)
    assert decoded(driver, chunk) == expected


@pytest.mark.parametrize("chunk", [7, 40])
def test_as_on_a_gpu(folder, expected, chunk):
    backend = CudaBackend(
        load_on_host(folder), blocks=160, block_size=4, max_seqs=2, max_tokens=64, max_length=160,
        timeline=HostTimeline(),
    )  # fmt: skip
    assert decoded(BackendDriver(backend, range(160)), chunk) == expected
    backend.close()


def decoded(driver, chunk):
    live = driver.add(0, PROMPT, 24)
    while live.computed < len(PROMPT):
        driver.run(driver.slice(0, min(chunk, len(PROMPT) - live.computed)))
    return driver.decode(0)[0]
