"""The Python front end: text in, text out, equal to transformers, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cuda.backend import CudaBackend
from engine.tiny import tiny
from experiments.engines import Engine
from experiments.llm import LLM, SamplingParams
from policies.budget import ChunkedPrefill, PrefillFirst, Static, TokenThrottling
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import Largest
from tests.engine.cuda_host import HostTimeline, load_on_host

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


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5},
        {"min_p": float("nan")}, {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.5}, {"frequency_penalty": -3.0}, {"logprobs": 21}, {"logprobs": -1}, {"logprobs": 2.0},
    ],
)  # fmt: skip
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value} must (be|lie) ") as caught:
        SamplingParams(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    """Greedy ones: of the likeliest token, as transformers' model has it."""
    from transformers import AutoModelForCausalLM

    quiet, asked = llm.generate(["Hello"] * 2, [SamplingParams(), SamplingParams(logprobs=3)])
    assert quiet.logprobs is None
    assert asked.logprobs is not None and len(asked.logprobs) == len(asked.token_ids)
    assert asked.token_ids == quiet.token_ids
    theirs = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    with torch.inference_mode():
        shares = theirs(torch.tensor([asked.prompt_token_ids + asked.token_ids])).logits[0].log_softmax(-1)
    for place, (token, told) in enumerate(zip(asked.token_ids, asked.logprobs, strict=True)):
        expected = shares[len(asked.prompt_token_ids) - 1 + place]
        assert told.value == pytest.approx(float(expected[token]), abs=1e-4)
        assert told.top[0] == (token, told.value)
        assert [value for _, value in told.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "policy", [Composed(ChunkedPrefill(7), overlap=Overlap(2)), Composed(TokenThrottling(16, 4, 2), victims=Largest())]
)
def test_penalties_whatever_the_policy(llm: LLM, policy: Composed) -> None:
    """Chunks, run-ahead, preemption and prefix hits in both: tokens and logprobs are those of each prompt alone."""
    params = [
        SamplingParams(24, repetition_penalty=1.3, logprobs=1),
        SamplingParams(24, frequency_penalty=1.5, presence_penalty=0.5, logprobs=0),
        SamplingParams(24, temperature=1.0, min_p=0.02, seed=3, frequency_penalty=0.5, logprobs=2),
        SamplingParams(24),
    ]
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert alone[0].token_ids != llm.generate(PROMPTS[0], SamplingParams(24))[0].token_ids
    with LLM("tiny", policy=policy, kv_blocks=18, block_size=8, max_length=144) as small:
        answers = small.generate(PROMPTS, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    for answer, expected in zip(answers, alone, strict=True):
        told = [one.value for one in answer.logprobs or ()]
        assert told == pytest.approx([one.value for one in expected.logprobs or ()], abs=1e-4)


# --- devices and weights


def test_random_weights_take_token_ids() -> None:
    with LLM("tiny", weights="random", max_length=64, kv_blocks=16) as llm:
        (answer,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4 and answer.text == ""
        with pytest.raises(ValueError, match=r"prompt='Hello' needs a tokenizer, .* give token ids"):
            llm.generate("Hello")
        with pytest.raises(ValueError, match="a conversation needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
    with LLM(tiny(), weights="random", max_length=64, kv_blocks=16) as llm:
        assert llm.generate("Hello")[0].text


def test_a_gpu_gets_the_backend_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model and the device that a GPU would have, on the host."""
    asked = {}

    def random_model(path: str, dtype: str, device: str, *rest: object) -> object:
        asked.update(path=path, dtype=dtype, device=device)
        return load_on_host(tiny("qwen3"))

    def backend(model: object, **options: object) -> CudaBackend:
        asked.update(options)
        return CudaBackend(model, timeline=HostTimeline(), **options)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.load.random_model", random_model)
    monkeypatch.setattr("engine.cuda.backend.CudaBackend", backend)
    with LLM("qwen3-8b", device="cuda:0", weights="random", cuda_graphs=False, gpu_memory_utilization=0.5,
             kv_blocks=32, max_seqs=4, max_length=64, max_tokens_per_step=64) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=4, frequency_penalty=1.0, logprobs=2)
        (answer,) = llm.generate([5, 6, 7], params)
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 4
    wanted = {"path": "qwen3-8b", "dtype": "auto", "device": "cuda:0", "graphs": False, "memory_utilization": 0.5}
    assert asked.items() >= wanted.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device=gpu: the engine has no such device; take cpu, cuda or cuda:NUMBER"),
        ({"weights": "rnadom"}, "weights=rnadom must be checkpoint or random"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 must lie in \(0, 1\]"),
        ({"weights": "random", "dtype": "int8"}, "dtype=int8 is not supported; choose one of auto, float32"),
    ],
)
def test_wrong_options_get_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LLM("tiny", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("model", ["qwen3-8b", "tiny"])
def test_no_gpu_is_told_before_anything_is_loaded(model: str) -> None:
    with pytest.raises(ValueError, match="device=cuda: no CUDA device is visible; take device=cpu"):
        LLM(model, device="cuda", weights="random")


def test_two_ranks_answer_as_one_does_and_leave(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.7 * (n % 2), seed=n, logprobs=2) for n in range(4)]
    expected = llm.generate(PROMPTS, params)
    with LLM("tiny", tp=2, max_length=512, kv_blocks=64) as two:
        processes = [peer.process for peer in two._backend._crew._peers]
        answers = [*two.generate(PROMPTS[:2], params[:2]), *two.generate(PROMPTS[2:], params[2:])]
        with pytest.raises(ValueError, match="vocabulary of"):
            two.generate([[10**6]])
    assert [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers] == [
        (answer.token_ids, answer.text, answer.finish_reason) for answer in expected
    ]
    logprobs = [one.value for answer in answers for one in answer.logprobs or ()]
    assert logprobs == pytest.approx([one.value for answer in expected for one in answer.logprobs or ()], abs=1e-4)
    assert len(processes) == 2
    assert None not in [process.poll() for process in processes]


def test_ranks_that_have_nobody_to_work_for_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(
        Engine, "spread", lambda *_, **__: SimpleNamespace(spec=None, close=lambda: closed.append(True))
    )
    with pytest.raises(AttributeError):
        LLM("tiny", tp=2)
    assert closed == [True]


def test_ranks_are_not_started_by_each_of_torchruns_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^LLM\(tp=2, stages=1, replicas=1\) starts its ranks itself, and torchrun"):
        LLM("tiny", tp=2)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"tp": 0}, r"^parallel.tp=0 must be at least 1"), ({"tp": 3}, "^parallel.tp=3 does not divide")],
)
def test_sizes_of_ranks_that_cannot_be(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LLM("tiny", **sizes)
