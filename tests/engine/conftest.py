import logging
import os

import pytest
import torch

from engine.load import load_model, load_tokenizer
from engine.tiny import ARCHITECTURES, tiny

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PROMPTS = (
    "The capital of France is",
    "How should the cook choose? First come, first served is fair and easy to explain.",
    "1 2 3",
    "A good schedule keeps the device busy and the people patient, and it does so without knowing when.",
    "Thank you for reading",
)


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(scope="session", params=[name for name in ARCHITECTURES if name not in ("qwen2-moe", "deepseek-v2")])
def checkpoint(request, tmp_path_factory):
    """The folder of each tiny checkpoint in turn; one mixture of experts is enough here, see `test_variants`."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def model(checkpoint):
    return load_model(checkpoint)


@pytest.fixture(scope="session")
def prompts(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    return [tokenizer(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="session")
def oracle(checkpoint):
    """Greedy tokens of transformers, one prompt at a time: prompt, number of tokens -> tokens."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(prompt, tokens):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    generate.model = theirs
    return generate


@pytest.fixture(scope="session")
def expected(oracle, prompts):
    """24 greedy tokens for each prompt."""
    return [oracle(prompt, 24) for prompt in prompts]


@pytest.fixture(scope="session")
def llama():
    """One architecture is enough where the model does not matter."""
    return load_model(tiny("llama"))
