"""From the content of a `config.json` to the sizes of a `ModelShape`: what each family states, and how it names it.

Defaults are those of transformers' classes. A `ValueError` names the field that is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from playground.model.encoders import clip, qwen3_vl, qwen25_vl
from playground.model.parts import Compressed, Experts, Indexer, Latent

Config = Mapping[str, Any]
Sizes = dict[str, Any]
"""Keyword arguments of `ModelShape`."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FULL, SLIDING = "full_attention", "sliding_attention"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_MISTRAL = ("MistralForCausalLM", "MinistralForCausalLM", "MixtralForCausalLM")


def read_sizes(config: Config) -> Sizes:
    """Everything but the precision."""
    architecture = _architecture(config)
    config, found = _decoder(config, architecture), _FAMILIES[architecture]
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    sizes: Sizes = dict(
        architecture=architecture,
        layers=size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", _HEAD_DIM.get(architecture, hidden // heads)),
        # Where every layer has experts, a config may not say how wide an MLP would be.
        intermediate=size(config, "intermediate_size", config.get("moe_intermediate_size")),
        vocabulary=size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture in _TIED)),
        max_length=size(config, "max_position_embeddings"),
        dtype_bytes=_dtype_bytes(config),
    )
    windows = _windows(config, architecture, sizes["layers"], sizes["max_length"])
    return sizes | dict(windows=windows) | found(config)


def size(config: Config, field: str, default: int | None = None) -> int:
    """A number of at least 1."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"field {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"field {field}={value!r} must be an integer of at least 1")
    return value


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name in _FAMILIES:
        return str(name)
    raise ValueError(f"architectures={name} is not supported; supported: {', '.join(_FAMILIES)}")


def _decoder(config: Config, architecture: str) -> Config:
    """The decoder's own fields: multimodal models keep them in `text_config`, ChatGLM has names of its own."""
    if architecture in _CHATGLM:
        return _chatglm_names(config)
    text = config.get("text_config")
    if architecture not in _BESIDE or not isinstance(text, dict):
        return config
    # What the outer level says holds where the decoder says nothing; LLaVA leaves what Llama's class has for defaults.
    defaults = _LLAMA_DEFAULTS if architecture == "LlavaForConditionalGeneration" else {}
    return {**defaults, **{key: value for key, value in config.items() if key != "text_config"}, **text}


def _dtype_bytes(config: Config) -> int:
    """`dtype` since transformers 5, `torch_dtype` before; without either the weights are float32, as there."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name in DTYPE_BYTES:
        return DTYPE_BYTES[name]
    raise ValueError(f"dtype={name} is not supported; supported: {', '.join(DTYPE_BYTES)}")


# --- windows


def _windows(config: Config, architecture: str, layers: int, max_length: int) -> tuple[int | None, ...]:
    """Each layer's window; empty if no layer has one.

    Mistral's holds wherever nothing else is said, Qwen's must be switched on, Gemma's and gpt-oss's alternate with
    full attention. One that no sequence outgrows is none: attention without one is faster.
    """
    if not _slides(config, architecture):
        if SLIDING in (config.get("layer_types") or ()) and architecture not in _FULL_ONLY:
            raise ValueError(f"layer_types names {SLIDING}, but no sliding_window is in use; mend either")
        return ()
    window = _window(config, architecture)
    if window >= max_length:
        return ()
    windows = tuple(window if slides else None for slides in _sliding(config, architecture, layers))
    return windows if any(windows) else ()


def _slides(config: Config, architecture: str) -> bool:
    if architecture in _FULL_ONLY or ("sliding_window" in config and config["sliding_window"] is None):
        return False
    return architecture in _MISTRAL or architecture in _PATTERN or bool(config.get("use_sliding_window"))


def _window(config: Config, architecture: str) -> int:
    value = config.get("sliding_window", 128 if architecture == "GptOssForCausalLM" else 4096)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"field sliding_window={value!r} must be a number above 0")
    return int(value)


def _sliding(config: Config, architecture: str, layers: int) -> list[bool]:
    """Layers that a window holds for: as `layer_types` says, else as the family has it."""
    kinds = config.get("layer_types")
    if kinds is None:
        if architecture in _PATTERN:
            every = size(config, "sliding_window_pattern", _PATTERN[architecture])
            return [(layer + 1) % every != 0 for layer in range(layers)]
        first = 0 if architecture in _MISTRAL else config.get("max_window_layers", 28)
        if not isinstance(first, int) or first < 0:
            raise ValueError(f"field max_window_layers={first!r} must be an integer of at least 0")
        return [layer >= first for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must name a kind for each of the {layers} layers")
    if other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise ValueError(f"layer_types={other[0]} is not supported; supported: {FULL}, {SLIDING}")
    return [kind == SLIDING for kind in kinds]


# --- families


def _llama(config: Config) -> Sizes:
    bias = bool(config.get("attention_bias", False))
    return dict(attention_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def _mistral(config: Config) -> Sizes:
    return {}


def _qwen2(config: Config) -> Sizes:
    # Qwen2 always has these three biases and no field says so.
    return dict(attention_bias=True)


def _qwen3(config: Config) -> Sizes:
    bias = bool(config.get("attention_bias", False))
    return dict(attention_bias=bias, output_bias=bias, qk_norm=True)


def _qwen2_moe(config: Config) -> Sizes:
    shared = size(config, "shared_expert_intermediate_size")
    experts = _qwen_experts(config, shared=shared, shared_gate=True)
    return dict(attention_bias=bool(config.get("qkv_bias", True)), experts=experts)


def _qwen3_moe(config: Config) -> Sizes:
    return {**_qwen3(config), "experts": _qwen_experts(config)}


def _qwen_experts(config: Config, **more: Any) -> Experts:
    layers, every = size(config, "num_hidden_layers"), size(config, "decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or ()
    dense = tuple(layer for layer in range(layers) if layer in named or (layer + 1) % every)
    # transformers 5 writes Qwen3's under a name of its own.
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return _experts(config, count, size(config, "moe_intermediate_size"), dense=dense, **more)


def _mixtral(config: Config) -> Sizes:
    return dict(experts=_experts(config, "num_local_experts", size(config, "intermediate_size")))


def _experts(config: Config, count: str, intermediate: int, **more: Any) -> Experts:
    return Experts(size(config, count), size(config, "num_experts_per_tok"), intermediate, **more)


def _shared_experts(config: Config, **more: Any) -> Experts:
    """As DeepSeek and GLM-4.5 name them. The first layers are dense; of the rest each `moe_layer_freq`-th is not."""
    layers, every = size(config, "num_hidden_layers"), size(config, "moe_layer_freq", 1)
    first = config.get("first_k_dense_replace") or 0
    dense = tuple(layer for layer in range(layers) if layer < first or layer % every)
    width = size(config, "moe_intermediate_size")
    shared = width * int(config.get("n_shared_experts") or 0)
    return _experts(config, "n_routed_experts", width, shared=shared, dense=dense, **more)


def _deepseek(config: Config, correction: bool = False) -> Sizes:
    rank = None if config.get("q_lora_rank") is None else size(config, "q_lora_rank")
    nope, rope = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
    latent = Latent(rank, size(config, "kv_lora_rank"), nope, rope, size(config, "v_head_dim"))
    bias = bool(config.get("attention_bias", False))
    experts = _shared_experts(config, correction=correction) if config.get("n_routed_experts") else None
    heads = size(config, "num_attention_heads")
    own: Sizes = dict(latent=latent, kv_heads=heads, head_dim=nope + rope, experts=experts)
    return own | dict(attention_bias=bias, output_bias=bias)


def _deepseek_v3(config: Config) -> Sizes:
    return _deepseek(config, correction=True)


def _deepseek_v32(config: Config) -> Sizes:
    sizes = (size(config, field) for field in ("index_n_heads", "index_head_dim", "index_topk"))
    return _deepseek_v3(config) | dict(indexer=Indexer(*sizes))


def _deepseek_v4(config: Config) -> Sizes:
    """`compress_ratios` names each layer's rate in published configs, `layer_types` since transformers 5."""
    named = {"sliding_attention": 0, _SPARSE: 4, _HEAVY: 128} | _rates(config)
    layers, kinds = size(config, "num_hidden_layers"), config.get("layer_types") or ()
    rates = list(config.get("compress_ratios") or [named.get(kind, -1) for kind in kinds])[:layers]
    if len(rates) != layers or min(rates) < 0:
        raise ValueError(f"layer_types must name one of {', '.join(named)} for each of the {layers} layers")
    compressed = Compressed(
        query_rank=size(config, "q_lora_rank"),
        groups=size(config, "o_groups"),
        output_rank=size(config, "o_lora_rank"),
        window=size(config, "sliding_window"),
        rates=tuple(rates),
        indexed=named[_SPARSE],
        index_heads=size(config, "index_n_heads"),
        index_width=size(config, "index_head_dim"),
        top=size(config, "index_topk"),
    )
    width = size(config, "moe_intermediate_size")
    experts = _experts(config, "n_routed_experts", width, shared=width * size(config, "n_shared_experts"))
    return dict(compressed=compressed, experts=experts, streams=size(config, "hc_mult"), kv_heads=1, windows=())


def _rates(config: Config) -> dict[str, int]:
    rates = config.get("compress_rates") or {}
    return {name: size(rates, name) for name in (_SPARSE, _HEAVY) if name in rates}


def _glm(config: Config) -> Sizes:
    return dict(attention_bias=bool(config.get("attention_bias", True)))


def _glm4(config: Config) -> Sizes:
    return {**_glm(config), "norms": 4}


def _glm4_moe(config: Config) -> Sizes:
    bias, norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    return dict(attention_bias=bias, qk_norm=norm, experts=_shared_experts(config, correction=True))


def _chatglm(config: Config) -> Sizes:
    bias = bool(config.get("add_bias_linear", False))
    return dict(attention_bias=bool(config.get("add_qkv_bias", False)) or bias, output_bias=bias, mlp_bias=bias)


def _chatglm_names(config: Config) -> Config:
    """ChatGLM2's, ChatGLM3's and GLM-4's own code has other words for the same."""
    renamed = {new: config[old] for old, new in _CHATGLM_NAMES.items() if config.get(old) is not None}
    if not config.get("multi_query_attention"):
        renamed.pop("num_key_value_heads", None)
    return {**config, **renamed}


def _gpt_oss(config: Config) -> Sizes:
    bias = bool(config.get("attention_bias", True))
    experts = _experts(config, "num_local_experts", size(config, "intermediate_size"), bias=True)
    return dict(attention_bias=bias, output_bias=bias, sinks=True, experts=experts)


def _gemma2(config: Config) -> Sizes:
    bias = bool(config.get("attention_bias", False))
    return dict(attention_bias=bias, output_bias=bias, norms=4)


def _gemma3(config: Config) -> Sizes:
    return {**_gemma2(config), "qk_norm": True}


def _beside(decoder: Callable[[Config], Sizes], encoder: Callable[[Config, int], int]) -> Callable[[Config], Sizes]:
    """A decoder with an encoder beside it."""

    def read(config: Config) -> Sizes:
        return {**decoder(config), "encoder_parameters": encoder(config, size(config, "hidden_size"))}

    return read


# What a family adds to the common fields, or states in another way: one row each.
_FAMILIES: dict[str, Callable[[Config], Sizes]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "Glm4MoeForCausalLM": _glm4_moe,
    "ChatGLMModel": _chatglm,
    "ChatGLMForConditionalGeneration": _chatglm,
    "GptOssForCausalLM": _gpt_oss,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlavaForConditionalGeneration": _beside(_llama, clip),
    "Qwen2_5_VLForConditionalGeneration": _beside(_qwen2, qwen25_vl),
    "Qwen3VLForConditionalGeneration": _beside(_qwen3, qwen3_vl),
    "Qwen3VLMoeForConditionalGeneration": _beside(_qwen3_moe, qwen3_vl),
}
_BESIDE = tuple(name for name in _FAMILIES if name.startswith(("Llava", "Qwen2_5_VL", "Qwen3VL")))
_CHATGLM = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
_TIED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_PATTERN = {"GptOssForCausalLM": 2, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}
"""Of so many layers the last one attends to everything, where `layer_types` does not say."""
_SWITCHED = tuple(name for name in _FAMILIES if name.startswith("Qwen"))
_FULL_ONLY = tuple(name for name in _FAMILIES if name not in (*_MISTRAL, *_PATTERN, *_SWITCHED))
# Where a config does not say, and the class has a number of its own.
_HEAD_DIM = {
    "Qwen3ForCausalLM": 128,
    "Qwen3VLForConditionalGeneration": 128,
    "Qwen3VLMoeForConditionalGeneration": 128,
    "GlmForCausalLM": 128,
    "Glm4ForCausalLM": 128,
    "GptOssForCausalLM": 64,
    "Gemma2ForCausalLM": 256,
    "Gemma3ForCausalLM": 256,
}
_LLAMA_DEFAULTS = dict(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
)
_CHATGLM_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "multi_query_group_num": "num_key_value_heads",
    "padded_vocab_size": "vocab_size",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
}
