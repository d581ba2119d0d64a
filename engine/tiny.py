"""Tiny checkpoints with random weights and a real tokenizer, made on first use so that nothing is downloaded.

The weights are scaled so that greedy text neither repeats itself nor hangs on a rounding error: tests that compare
tokens would prove nothing otherwise. Everything is seeded; the same files come out on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cache import prepared
from engine.errors import EngineError
from engine.tiny_text import CHAT_TEMPLATE, TEXT
from playground.model import ModelShape

VERSION = 1
"""Part of the folder's name: raise it when anything here changes what is written."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
VOCABULARY = 512

COMMON: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "dtype": "float32",
    "attention_dropout": 0.0,
}

LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
"""What DeepSeek's two families have in common."""

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,  # as in the real ones: not hidden_size / num_attention_heads
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "deepseek-v2": {
        **LATENT,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,  # as in the Lite one
        "topk_method": "greedy",
    },
    "deepseek-v3": {
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 48,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
}
"""What the architectures' config files add to `COMMON`."""


def tiny(architecture: str = "llama", root: Path | None = None) -> Path:
    """The folder of a tiny checkpoint; `root` replaces the playground's cache."""
    if architecture not in ARCHITECTURES:
        raise EngineError(f"model=tiny-{architecture} does not exist; choose one of {', '.join(ARCHITECTURES)}")
    return prepared(f"tiny-{architecture}-v{VERSION}", lambda folder: _write(folder, architecture), root)


def _write(folder: Path, architecture: str) -> None:
    config = {**COMMON, **ARCHITECTURES[architecture]}
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 0})
    save_file(dict(_tensors(config)), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _dump(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --- weights


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Names and values as the Hugging Face classes expect them."""
    # Not torch's generator: its normal numbers differ in the last bits between kinds of CPU.
    draw = _Draw(np.random.default_rng(20240607))
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", draw.normal(vocabulary, hidden, deviation=0.4)
    for index in range(config["num_hidden_layers"]):
        for name, tensor in _layer(config, draw, ModelShape.from_hf(config).has_experts(index)):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", draw.around(1.0, hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", draw.normal(vocabulary, hidden, deviation=0.4)


def _layer(config: Mapping[str, Any], draw: _Draw, mixed: bool) -> Iterator[tuple[str, Tensor]]:
    yield from _latent(config, draw) if "kv_lora_rank" in config else _heads(config, draw)
    yield from (
        _experts(config, draw) if mixed else _mlp("mlp", config["hidden_size"], config["intermediate_size"], draw)
    )
    yield "input_layernorm.weight", draw.around(1.0, config["hidden_size"])
    yield "post_attention_layernorm.weight", draw.around(1.0, config["hidden_size"])


def _heads(config: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    widths = {"q": heads * head_dim, "k": config["num_key_value_heads"] * head_dim}
    widths["v"] = widths["k"]
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", draw.projection(width, hidden, gain=2.0)
        if config["model_type"] in ("qwen2", "qwen2_moe"):
            yield f"self_attn.{name}_proj.bias", draw.around(0.0, width)
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", draw.around(1.5, head_dim)
        yield "self_attn.k_norm.weight", draw.around(1.5, head_dim)
    yield "self_attn.o_proj.weight", draw.projection(hidden, widths["q"], gain=1.5)


def _latent(config: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, queries = config["qk_rope_head_dim"], config["q_lora_rank"]
    width = heads * (config["qk_nope_head_dim"] + rope)
    if queries is None:
        yield "self_attn.q_proj.weight", draw.projection(width, hidden, gain=2.0)
    else:
        yield "self_attn.q_a_proj.weight", draw.projection(queries, hidden, gain=1.0)
        yield "self_attn.q_a_layernorm.weight", draw.around(1.0, queries)
        yield "self_attn.q_b_proj.weight", draw.projection(width, queries, gain=2.0)
    yield "self_attn.kv_a_proj_with_mqa.weight", draw.projection(rank + rope, hidden, gain=2.0)
    yield "self_attn.kv_a_layernorm.weight", draw.around(1.0, rank)
    expanded = heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    yield "self_attn.kv_b_proj.weight", draw.projection(expanded, rank, gain=2.0)
    yield "self_attn.o_proj.weight", draw.projection(hidden, heads * config["v_head_dim"], gain=1.5)


def _mlp(prefix: str, hidden: int, width: int, draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}.gate_proj.weight", draw.projection(width, hidden, gain=2.0)
    yield f"{prefix}.up_proj.weight", draw.projection(width, hidden, gain=1.0)
    yield f"{prefix}.down_proj.weight", draw.projection(hidden, width, gain=1.0)


def _experts(config: Mapping[str, Any], draw: _Draw) -> Iterator[tuple[str, Tensor]]:
    hidden, count = config["hidden_size"], config.get("num_experts") or config["n_routed_experts"]
    yield "mlp.gate.weight", draw.projection(count, hidden, gain=2.0)
    if config["model_type"] == "deepseek_v3":
        yield "mlp.gate.e_score_correction_bias", draw.around(0.0, count)
    for index in range(count):
        yield from _mlp(f"mlp.experts.{index}", hidden, config["moe_intermediate_size"], draw)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _mlp("mlp.shared_expert", hidden, shared, draw)
        yield "mlp.shared_expert_gate.weight", draw.projection(1, hidden, gain=1.0)
    if many := config.get("n_shared_experts"):
        yield from _mlp("mlp.shared_experts", hidden, many * config["moe_intermediate_size"], draw)


class _Draw:
    """Seeded tensors in the order they are asked for."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def normal(self, *shape: int, deviation: float, mean: float = 0.0) -> Tensor:
        return torch.from_numpy((self._rng.standard_normal(shape) * deviation + mean).astype(np.float32))

    def projection(self, outputs: int, inputs: int, gain: float) -> Tensor:
        """[outputs, inputs] that turns inputs of deviation 1 into outputs of deviation `gain`."""
        return self.normal(outputs, inputs, deviation=gain * inputs**-0.5)

    def around(self, mean: float, width: int) -> Tensor:
        """A vector that is nearly constant, but not so much that leaving it out would go unseen."""
        return self.normal(width, deviation=0.2, mean=mean)


# --- tokenizer


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if (size := tokenizer.get_vocab_size()) != VOCABULARY:
        raise EngineError(f"tiny tokenizer: {size} tokens learnt, {VOCABULARY} wanted; lengthen engine.tiny_text.TEXT")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[0],
        "model_max_length": COMMON["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _dump(folder / "tokenizer_config.json", settings)
