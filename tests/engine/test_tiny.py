import hashlib

import pytest
import torch

from engine.errors import EngineError
from engine.load import load_tokenizer
from engine.tiny import tiny
from playground.model import ModelShape


def test_greedy_text_is_lively(oracle, prompts):
    """Equality of tokens proves nothing if they are all the same, or if rounding picks them."""
    for prompt in prompts[:4]:
        tokens = oracle(prompt, 64)
        assert len(set(tokens)) >= 20
        with torch.inference_mode():
            logits = oracle.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.T
        assert (best - second).min() > 1e-3


def test_tokenizer_is_real(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    text = "The cook has one stove; naïve Grüße, 你好!"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert len(tokenizer) == 512 and tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_files_are_the_same_every_time(tmp_path):
    first, second = tiny("qwen3", tmp_path / "a"), tiny("qwen3", tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (first, second)]
        assert digests[0] == digests[1], name


def test_a_second_call_finds_the_first_ones_folder(tmp_path):
    folder = tiny("llama", tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny("llama", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_unknown_architecture():
    with pytest.raises(EngineError, match=r"tiny-gpt2 does not exist; choose one of llama, qwen2, qwen3"):
        tiny("gpt2")


def test_simulated_shape_is_the_checkpoints():
    """`model=tiny` means one thing in both backends."""
    assert ModelShape.read("tiny") == ModelShape.read(str(tiny("llama")))
