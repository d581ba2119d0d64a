"""A decoder's shape as its Hugging Face `config.json` states it: shared by the roofline and the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder-only transformer. Lengths in tokens, widths in elements."""

    architecture: str
    """As in `architectures[0]`: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, ..."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    max_length: int = 1 << 20
    dtype_bytes: int = 2
