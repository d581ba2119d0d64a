"""Text in, text out, without Hydra: the engine behind the same scheduler and policies.

from experiments.llm import LLM, SamplingParams

llm = LLM("tiny")
for answer in llm.generate(["Hello"], SamplingParams(max_tokens=16)):
    print(answer.text)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.engines import Engine, checkpoint_folder, layout_of
from experiments.settings import Parallel, check_weights
from experiments.torchrun import check_alone
from playground.backend import Backend
from playground.core import Done, Logprob, Request, Sampling, Step
from playground.loop import serve
from playground.policy import Policy
from playground.rank import hash_tokens
from playground.scheduler import Ended, Scheduler
from playground.trace import NoTrace
from playground.workload.source import OpenLoop

if TYPE_CHECKING:
    from engine.config import DecoderConfig

Prompt = str | Sequence[int]
Message = Mapping[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens, and how many. Greedy unless `temperature` is above 0.

    `seed` makes sampled text repeatable, whatever else is in the batch. `stop_token_ids` end a text besides the
    model's own end token, which `ignore_eos` turns off. What penalties, `min_p` and `logprobs` do is said in
    `playground.core.Sampling`; they hold for greedy texts too, but for `min_p`.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        self.sampling()  # refuses what cannot be sampled from

    def sampling(self) -> Sampling:
        """What the engine needs of it."""
        values = {option.name: getattr(self, option.name) for option in fields(Sampling)}
        return Sampling(**values | {"stop_token_ids": tuple(self.stop_token_ids)})


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `finish_reason`: `stop` (end token) or `length` (`max_tokens` reached).

    `text` is empty where the model has no tokenizer.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[Logprob, ...] | None = None
    """Of each token, if they were asked for."""


class LLM:
    """A model, its KV cache and a scheduler. The prefix cache lives as long as the object.

    `model` is a Hugging Face folder, `tiny` or `smollm2-135m`, or with `weights="random"` also any model that ships,
    `qwen3-8b` say, which has no tokenizer then: give it token ids. `device` is cpu, cuda or cuda:NUMBER; `cuda_graphs`,
    `gpu_memory_utilization` and `dtype` are as in `experiments.engines.Engine`. `policy` is any scheduling policy
    (default: vLLM v1's); `kv_blocks` blocks of `block_size` tokens (None: a share of the free memory) on each rank.
    Errors are `ValueError`s of one line.

    `replicas` x `stages` x `tp` ranks serve together, each a process of its own that lives until `close`; with
    `device="cuda"` each takes a GPU of this host. Texts are those of one rank. A rank that is lost in the middle ends
    all of them: `engine.errors.StepFailed`, and this object is of no use any more.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        policy: Policy | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        weights: str = "checkpoint",
        cuda_graphs: bool = True,
        gpu_memory_utilization: float = 0.9,
        kv_blocks: int | None = None,
        block_size: int = 16,
        max_seqs: int = 256,
        max_tokens_per_step: int = 8192,
        max_length: int | None = None,
        tp: int = 1,
        stages: int = 1,
        replicas: int = 1,
    ) -> None:
        check_weights(weights)
        engine = Engine(
            dtype=dtype, device=device, cuda_graphs=cuda_graphs, gpu_memory_utilization=gpu_memory_utilization
        )
        sizes = dict(
            blocks=kv_blocks,
            block_size=block_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens_per_step,
            max_length=max_length,
        )
        parallel = Parallel(stages=stages, tp=tp, replicas=replicas)
        self.tokenizer = _tokenizer(str(model), weights)
        self._config, self._backend = _loaded(engine, str(model), weights, parallel, sizes)
        try:
            self._scheduler = Scheduler(self._backend.spec, policy or _default_policy())
        except BaseException:
            self.close()  # ranks would wait for steps
            raise
        self._ids = count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._backend.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete the prompts (texts or token ids), batched as the policy likes; answers in the prompts' order.

        `params`: for all, or one for each.
        """
        tokens = [self._tokens(prompt) for prompt in _as_list(prompts)]
        each = _one_each(params or SamplingParams(), len(tokens))
        now = self._backend.now()
        requests = [self._request(prompt, one, now) for prompt, one in zip(tokens, each, strict=True)]
        for request in requests:  # before anything is computed
            if why := self._scheduler.impossible(request):
                raise ValueError(f"{why}: shorten the prompt, lower max_tokens, or give more kv_blocks")
        collected = _Collector()
        serve(OpenLoop(requests), self._scheduler, self._backend, collected)
        return [self._completion(request, collected) for request in requests]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer one conversation, by the tokenizer's chat template."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this model has none: give token ids to generate")
        if self.tokenizer.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template: use generate")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has put them in
        return self.generate([ids], params)[0]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str) and self.tokenizer is None:
            raise ValueError(f"prompt={prompt[:20]!r} needs a tokenizer, and this model has none: give token ids")
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not len(ids):
            raise ValueError("a prompt is empty: it must have at least one token")
        size = self._config.shape.vocabulary
        if any(not 0 <= token < size for token in ids):
            raise ValueError(f"a prompt holds a token outside the model's vocabulary of {size}")
        return tuple(map(int, ids))

    def _request(self, prompt: tuple[int, ...], params: SamplingParams, now: float) -> Request:
        size = self._backend.spec.block_size
        return Request(
            next(self._ids),
            now,
            len(prompt),
            params.max_tokens,
            prompt=prompt,
            hashes=hash_tokens(prompt, size),
            hash_block=size,
            sampling=params.sampling(),
        )

    def _completion(self, request: Request, collected: _Collector) -> Completion:
        ended = collected.ends[request.id]
        if ended.outcome != "finished":
            raise ValueError(f"prompt of {request.prompt_length} tokens was {ended.outcome}: {ended.why}")
        tokens = tuple(collected.tokens.get(request.id, ()))
        reason = "length" if len(tokens) == request.max_tokens and not self._is_stop(tokens[-1], request) else "stop"
        text = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
        told = None if request.sampling.logprobs is None else tuple(collected.logprobs[request.id])
        assert request.prompt is not None
        return Completion(request.prompt, tokens, text, reason, ended.sequence.cached_tokens, told)

    def _is_stop(self, token: int, request: Request) -> bool:
        sampling = request.sampling
        stop = sampling.stop_token_ids if sampling.ignore_eos else (*self._config.eos, *sampling.stop_token_ids)
        return token in stop


def _loaded(
    engine: Engine, model: str, weights: str, parallel: Parallel, sizes: Mapping[str, Any]
) -> tuple[DecoderConfig, Backend]:
    """What the model is, and what computes it; or nothing: a half-made `LLM` would keep a model that nobody can use."""
    from engine.config import find_config
    from engine.memory import whole_or_nothing

    if (layout := layout_of(parallel)).ranks > 1:
        check_alone(f"LLM(tp={layout.tp}, stages={layout.stages}, replicas={layout.replicas})", os.environ)
        path = model if weights == "random" else str(checkpoint_folder(model))
        return find_config(path), engine.spread(path, layout, weights, **sizes)
    with whole_or_nothing():
        return _alone(engine, model, weights, sizes)


def _alone(engine: Engine, model: str, weights: str, sizes: Mapping[str, Any]) -> tuple[DecoderConfig, Backend]:
    """On one rank. A frame of its own, so that it can be cleared when it fails."""
    decoder = engine.decoder(model, weights)
    return decoder.config, engine.backend(decoder, **sizes)


def _tokenizer(model: str, weights: str) -> Any:
    """A checkpoint's. Where nothing else is read from its folder it may lack one."""
    from engine.load import TOKENIZERS, load_tokenizer

    if weights == "random" and not any((Path(model) / name).is_file() for name in TOKENIZERS):
        return None
    return load_tokenizer(model if weights == "random" else checkpoint_folder(model))


class _Collector(NoTrace):
    """Keeps the tokens of every request with their logprobs, and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Logprob]] = {}
        self.ends: dict[int, Ended] = {}

    def committed(self, done: Done, step: Step) -> None:
        for id, tokens in done.tokens.items():
            if id not in self.ends:  # else it ended before: the tokens came too late
                self.tokens.setdefault(id, []).extend(tokens)
                self.logprobs.setdefault(id, []).extend(done.logprobs.get(id, ()))

    def ended(self, ended: Ended) -> None:
        self.ends[ended.request.id] = ended


def _default_policy() -> Policy:
    from policies.budget import Unified
    from policies.composed import Composed

    return Composed(Unified())


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one prompt, as text or as tokens
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams], prompts: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise ValueError(f"{len(params)} SamplingParams for {prompts} prompts: give one, or one for each")
    return params
