"""transformers on the same GPU and shape."""

from __future__ import annotations

import time

import torch

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.subject import Subject


def transformers(report: Report, subject: Subject) -> None:
    """`generate` on the same GPU and shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = subject.model.shape
    subject.release()
    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, max_position_embeddings=shape.max_length, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for rows in (1, 32):
        ids = torch.randint(0, shape.vocabulary, (rows, 512), device="cuda")
        spans = []
        for new in (4, 36):
            torch.cuda.synchronize()
            began = time.perf_counter()
            theirs.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
                            do_sample=False, pad_token_id=0)  # fmt: skip
            torch.cuda.synchronize()
            spans.append(time.perf_counter() - began)
        report.row(f"transformers generate, decode step {rows} x 512", (spans[1] - spans[0]) / 32 * 1e3, "ms")
