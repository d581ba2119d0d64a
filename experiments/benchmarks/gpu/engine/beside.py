"""`transformers` on the same GPU with the same shape: `generate`, and `generate_batch` (its continuous batching).

Both as they choose for themselves: `generate_batch` takes CUDA graphs and asynchronous batching where its attention
allows them, which without flash-attn it does not; what it chose is recorded. Its warm-up is not timed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import alike, policy, served
from experiments.benchmarks.gpu.engine.subject import Subject
from playground.model import ModelShape

PROMPT, OUTPUT = 512, 128
DECODES = (1, 32)
BATCHES = (64, 256)
GRAPHS = {"use_cuda_graph": True, "use_async_batching": True}
"""What it does not choose by itself here."""
MOST_SECONDS = 90.0
"""After which a batch is cut short, and reported as such."""


def transformers(report: Report, subject: Subject) -> None:
    shape = subject.model.shape
    ours_ms = {rows: _our_decode_ms(subject, rows) for rows in DECODES}
    ours_tokens = {count: _our_tokens_per_second(subject, count) for count in BATCHES}
    subject.release()
    model = theirs(shape, "cuda")
    for rows, ours in ours_ms.items():
        report.attempt(f"generate {rows}", partial(_generate, report, model, rows, ours))
        report.attempt(f"generate_batch {rows}", partial(_decode, report, model, rows, ours))
    for count, asked in ((BATCHES[1], {}), (BATCHES[0], GRAPHS)):
        ours = ours_tokens[count]
        report.attempt(f"generate_batch {count}, {asked}", partial(_batch, report, model, count, ours, asked))
    del model
    gc.collect()
    torch.cuda.empty_cache()


def _generate(report: Report, model: Any, rows: int, ours: float) -> None:
    took = generate_step_ms(model, rows)
    report.row(f"transformers generate, decode step {rows} x {PROMPT}", took, "ms", ours_ms=ours, ratio=took / ours)


def _decode(report: Report, model: Any, rows: int, ours: float) -> None:
    batch = batched(model, prompts(model.config.vocab_size, rows), 36, MOST_SECONDS)
    report.row(
        f"transformers generate_batch, decode step {rows} x {PROMPT}", batch.step_ms, "ms", ours_ms=ours,
        ratio=batch.step_ms / ours, choices=batch.choices,
    )  # fmt: skip


def _batch(report: Report, model: Any, count: int, ours: float, asked: Mapping[str, bool]) -> None:
    ids = prompts(model.config.vocab_size, count)
    batch = batched(model, ids, OUTPUT, MOST_SECONDS, dict(asked))
    report.row(
        f"transformers generate_batch, {count} x ({PROMPT} + {OUTPUT})", batch.tokens_per_second, "tokens/s",
        ours_tokens_per_s=ours, ratio=ours / batch.tokens_per_second, finished=batch.finished, requests=count,
        seconds=batch.seconds, decode_ms=batch.step_ms, choices=batch.choices,
    )  # fmt: skip


def _our_decode_ms(subject: Subject, rows: int) -> float:
    run = served(subject.backend, alike(rows, PROMPT, 36, seed=40 + rows), policy(8192, 2))
    found = [done for _, done in run.decodes(rows)]
    return statistics.median(later.finished - earlier.finished for earlier, later in pairwise(found)) * 1e3


def _our_tokens_per_second(subject: Subject, count: int) -> float:
    run = served(subject.backend, alike(count, PROMPT, OUTPUT, seed=50 + count), policy(2048, 2))
    return count * OUTPUT / run.duration


def theirs(shape: ModelShape, device: str) -> Any:
    """Their Qwen3 of our shape, with random weights in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # importing it takes seconds

    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, max_position_embeddings=shape.max_length, tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def prompts(vocabulary: int, count: int) -> list[list[int]]:
    return torch.randint(0, vocabulary, (count, PROMPT)).tolist()


def generate_step_ms(model: Any, rows: int, length: int = PROMPT) -> float:
    """The difference of two lengths: neither the prompt nor what a call costs once."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=model.device)
    spans = []
    for new in (4, 4, 36):  # the first is a warm-up
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert out.cpu().shape == (rows, length + new)
        spans.append(time.perf_counter() - began)
    return (spans[2] - spans[1]) / 32 * 1e3


@dataclass(frozen=True)
class Batch:
    """What came of one batch, whole or cut short."""

    finished: int
    tokens: int
    seconds: float
    step_ms: float
    """Between two tokens of a request once no request waits for its first."""
    choices: dict[str, str]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def batched(
    model: Any, ids: Sequence[list[int]], new: int, most_seconds: float, asked: Mapping[str, Any] | None = None
) -> Batch:
    """`generate_batch` with a limit of seconds: it has none itself, but its parts are public."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    rules = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(max(map(len, ids)), new, len(ids))
    results: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=rules, continuous_batching_config=ContinuousBatchingConfig(**(asked or {})), timeout=5,
        workload_hints=hints,
    ) as manager:  # fmt: skip
        began = time.perf_counter()
        names = manager.add_requests(inputs=list(ids), max_new_tokens=new, record_timestamps=True)
        while len(results) < len(ids) and time.perf_counter() - began < most_seconds:
            result = manager.get_result(timeout=0.2)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch: its thread ended before the requests did")
        seconds = time.perf_counter() - began
        running = list(manager.batch_processor.scheduler.active_requests.values())
        tokens = sum(len(state.generated_tokens) for state in [*results.values(), *running])
        stamps = [list(state.timestamps or ()) for state in [*results.values(), *running]]
        for name in names:
            if name not in results:
                manager.cancel_request(name)
        chosen = manager.continuous_batching_config
        choices = {
            "attention": str(model.config._attn_implementation), "cuda_graphs": str(chosen.use_cuda_graph),
            "asynchronous": str(chosen.use_async_batching),
        }  # fmt: skip
    if errors := [result.error for result in results.values() if result.error]:
        raise RuntimeError(f"generate_batch: {errors[0]}")
    return Batch(len(results), tokens, seconds, _step_ms(stamps, len(ids)), choices)


def _step_ms(stamps: Sequence[list[float]], count: int) -> float:
    begun = [times for times in stamps if times]
    if len(begun) < count:
        return 0.0  # some still waited when it was cut
    full = max(times[0] for times in begun)
    gaps = [late - early for times in begun for early, late in pairwise(times) if early >= full]
    return statistics.median(gaps) * 1e3 if gaps else 0.0
