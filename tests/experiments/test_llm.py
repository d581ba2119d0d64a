"""The Python front end: text in, text out, equal to transformers, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.tiny import tiny
from experiments.llm import LLM, SamplingParams
from policies.budget import ChunkedPrefill, PrefillFirst, Static, TokenThrottling
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import Largest

PROMPTS = ["Licensed under the", "Hello", "the quick brown fox jumps over the lazy dog " * 4, "x"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_length=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answers.append(tuple(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()))
    return answers


def test_greedy_text_equals_transformers(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [answer.token_ids for answer in answers] == expected
    assert answers[0].text == llm.tokenizer.decode(expected[0], skip_special_tokens=True)
    assert {answer.finish_reason for answer in answers} <= {"length", "stop"}


@pytest.mark.parametrize(
    "policy",
    [
        Composed(PrefillFirst(64)),
        Composed(ChunkedPrefill(7)),
        Composed(Static(2)),
        Composed(TokenThrottling(16, 4, 2), victims=Largest()),
        Composed(ChunkedPrefill(16), overlap=Overlap(2)),
    ],
)
def test_no_policy_changes_a_token(policy: Composed, expected: list[tuple[int, ...]]) -> None:
    """With 18 blocks of 8 tokens the four do not fit at once: some are preempted and computed again."""
    with LLM("tiny", policy=policy, kv_blocks=18, block_size=8, max_length=144) as small:
        answers = small.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [answer.token_ids for answer in answers] == expected


def test_prefix_is_found_again(llm: LLM) -> None:
    first = llm.generate("a long beginning that two prompts share, word for word, and then it ends: one")
    again = llm.generate("a long beginning that two prompts share, word for word, and then it ends: two")
    assert again[0].cached_tokens >= llm._backend.spec.block_size
    assert first[0].prompt_token_ids != again[0].prompt_token_ids


def test_seeds_repeat_whatever_else_is_in_the_batch(llm: LLM) -> None:
    warm = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=7)
    alone = llm.generate("Hello", warm)[0]
    among = llm.generate(PROMPTS, warm)[1]
    other = llm.generate("Hello", SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=8))[0]
    assert alone.token_ids == among.token_ids != other.token_ids


def test_token_ids_and_stop_tokens(llm: LLM) -> None:
    ids = llm.tokenizer("Hello")["input_ids"]
    free = llm.generate(ids, SamplingParams(max_tokens=8))[0]
    stop = free.token_ids[3]
    stopped = llm.generate([ids], SamplingParams(max_tokens=8, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_chat_uses_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi"}])
    assert llm.tokenizer.decode(answer.prompt_token_ids).startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "a prompt is empty"),
        ([[1, 99999]], None, "outside the model's vocabulary of 512"),
        (["a", "b"], [SamplingParams()], "1 SamplingParams for 2 prompts"),
        ("Hello", SamplingParams(max_tokens=100_000), "exceeds 512 tokens"),
    ],
)
def test_mistakes_get_one_line(llm: LLM, prompts: object, params: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"model\.path=/nowhere"):
        LLM("/nowhere")


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
