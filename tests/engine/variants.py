"""Small models of every kind that configs of the supported families describe, as transformers builds and saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

COMMON: Mapping[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=120,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)

LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
WINDOWED = dict(use_sliding_window=True, sliding_window=7)
MIXTURE = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=14
)
DEEPSEEK = dict(
    LATENT,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
    n_group=4,
    topk_group=2,
)
STRETCHED = dict(YARN, mscale=0.8, mscale_all_dim=1.2)
MIXED = ["full_attention", "sliding_attention", "full_attention"]


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **parameters}}


VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", rope()),
    "llama, linear": ("llama", rope(rope_type="linear", factor=2.0)),
    "llama, dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "llama, llama3": ("llama", rope(**LLAMA3)),
    "llama, yarn": ("llama", rope(**YARN)),
    "llama, biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, wide heads, one of keys, tied": (
        "llama",
        dict(head_dim=24, num_key_value_heads=1, tie_word_embeddings=True),
    ),
    "qwen2": ("qwen2", rope(rope_theta=1e6)),
    "qwen2, tied, yarn": ("qwen2", dict(tie_word_embeddings=True, **rope(**YARN))),
    "qwen2, last layers windowed": ("qwen2", dict(max_window_layers=1, **WINDOWED)),
    "qwen2, all layers windowed": ("qwen2", dict(max_window_layers=0, **WINDOWED)),
    "qwen2, window switched off": ("qwen2", dict(use_sliding_window=False, sliding_window=7, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=32)),
    "qwen3, biases, tied": ("qwen3", dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "qwen3, a layer windowed": ("qwen3", dict(head_dim=16, layer_types=MIXED, **WINDOWED)),
    "qwen2_moe": ("qwen2_moe", MIXTURE),
    "qwen2_moe, every second layer, normalised": (
        "qwen2_moe",
        dict(MIXTURE, decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True),
    ),
    "qwen3_moe": ("qwen3_moe", dict(MIXTURE, head_dim=32, norm_topk_prob=True)),
    "qwen3_moe, a dense layer, biases": (
        "qwen3_moe",
        dict(MIXTURE, head_dim=16, mlp_only_layers=[1], attention_bias=True, num_experts_per_tok=1),
    ),
    "deepseek_v2": ("deepseek_v2", dict(DEEPSEEK, topk_method="group_limited_greedy", **rope(**STRETCHED))),
    "deepseek_v2, queries not compressed": (
        "deepseek_v2",
        dict(DEEPSEEK, q_lora_rank=None, topk_method="greedy", attention_bias=True),
    ),
    "deepseek_v3": ("deepseek_v3", dict(DEEPSEEK, norm_topk_prob=True, **rope(**STRETCHED))),
    "deepseek_v3, one group, biases, wide values": (
        "deepseek_v3",
        dict(DEEPSEEK, n_group=1, topk_group=1, attention_bias=True, v_head_dim=24, first_k_dense_replace=0),
    ),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral, windowed, wide heads": ("mistral", dict(sliding_window=7, head_dim=32)),
    "mistral, a layer windowed": ("mistral", dict(sliding_window=7, head_dim=16, layer_types=MIXED)),
    "half of a head rotates": ("phi3", rope(partial_rotary_factor=0.5)),
}
"""By what is special: model type, and what its config adds to `COMMON`."""


def build(name: str, folder: Path, **changes: Any) -> Any:
    """The model of transformers, whose checkpoint lies in `folder` then."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, special = VARIANTS[name]
    stated = {**COMMON, **special, **changes, "model_type": kind, "dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    config = AutoConfig.from_pretrained(folder)  # as a folder's: mistral with `layer_types` becomes ministral
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(len(name))
    for parameter, tensor in model.named_parameters():
        tensor.data = _drawn(parameter, tensor.data, generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    model.save_pretrained(folder)
    if kind == "phi3":
        _as_llama(folder, stated)
    return model


def _drawn(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random in a way that neither leaves out a part nor makes text repeat itself."""
    normal = torch.randn(like.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    gain = 4.0 if "o_proj" in name or "down_proj" in name else 1.5  # layers outweigh a tied embedding
    return normal * gain * like.shape[-1] ** -0.5


def _as_llama(folder: Path, config: dict[str, Any]) -> None:
    """Phi-3 is a Llama with merged projections; of the families here no class of transformers rotates half a head."""
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    queries = config["hidden_size"]
    keys = queries // config["num_attention_heads"] * config["num_key_value_heads"]
    split: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "qkv_proj": lambda merged: merged.split((queries, keys, keys)),
        "gate_up_proj": lambda merged: merged.chunk(2),
    }
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        merged = next((part for part in parts if part in name), None)
        if merged is None:
            tensors[name] = tensor
            continue
        for part, piece in zip(parts[merged], split[merged](tensor), strict=True):
            tensors[name.replace(merged, part)] = piece.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    stated = {**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(stated))
