"""Every family of configs: small models of each, whose parameters transformers' own class counts."""

import pytest

from playground.model import Experts, Latent, ModelShape, Precision, Reach

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PLAIN = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=96,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
LATENT = dict(
    kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, num_key_value_heads=4, q_lora_rank=None
)
SHARED = dict(
    n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=24, first_k_dense_replace=2
)
HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
QWEN_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
VISION = dict(hidden_size=16, intermediate_size=40, depth=3, num_heads=2, out_hidden_size=48, spatial_merge_size=2)
CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
FAMILIES = {
    "llama": ("LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralForCausalLM", dict(head_dim=16)),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        dict(shared_expert_intermediate_size=40, decoder_sparse_step=2, **QWEN_EXPERTS),
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", dict(head_dim=16, mlp_only_layers=[0, 3], **QWEN_EXPERTS)),
    "mixtral": ("MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**SHARED, **LATENT}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**SHARED, **LATENT, "q_lora_rank": 12}),
    "deepseek-v32": (
        "DeepseekV32ForCausalLM",
        {**SHARED, **LATENT, "q_lora_rank": 12, "index_n_heads": 3, "index_head_dim": 10, "index_topk": 4},
    ),
    "deepseek-v4": (
        "DeepseekV4ForCausalLM",
        dict(
            intermediate_size=24,
            num_key_value_heads=1,
            head_dim=12,
            q_lora_rank=20,
            o_groups=2,
            o_lora_rank=6,
            sliding_window=8,
            index_n_heads=3,
            index_head_dim=10,
            index_topk=4,
            hc_mult=3,
            layer_types=[HEAVY, SPARSE, "sliding_attention", SPARSE, HEAVY],
            mlp_layer_types=["hash_moe"] * 5,  # the others have a correction of routing, which is not counted here
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
        ),
    ),
    "glm": ("GlmForCausalLM", dict(head_dim=12, attention_bias=True, pad_token_id=None)),
    "glm4": ("Glm4ForCausalLM", dict(head_dim=12, attention_bias=True, pad_token_id=None)),
    "glm4-moe": ("Glm4MoeForCausalLM", dict(head_dim=16, attention_bias=True, use_qk_norm=True, **SHARED)),
    "gpt-oss": ("GptOssForCausalLM", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "gemma2": ("Gemma2ForCausalLM", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma3": ("Gemma3ForCausalLM", dict(head_dim=16, tie_word_embeddings=True)),
}
BESIDE = {
    "llava": ("LlavaForConditionalGeneration", dict(model_type="llama"), CLIP),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        dict(model_type="qwen2_5_vl_text"),
        dict(VISION, patch_size=14, window_size=28),
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        dict(head_dim=12),
        dict(VISION, patch_size=16, num_position_embeddings=36, deepstack_visual_indexes=[0, 2]),
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        dict(head_dim=12, **QWEN_EXPERTS),
        dict(VISION, patch_size=16, num_position_embeddings=36, deepstack_visual_indexes=[1]),
    ),
}


def counted(architecture: str, config: dict) -> int:
    """By transformers, without weights. DeepSeek's correction of routing is a buffer there, a tensor of checkpoints."""
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        model = kind(kind.config_class(**config))
    buffers = [value.numel() for name, value in model.named_buffers() if "e_score_correction" in name]
    return sum(value.numel() for value in model.parameters()) + sum(buffers)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_transformers_makes(family):
    architecture, own = FAMILIES[family]
    config = {**PLAIN, **own}
    shape = ModelShape.from_hf({"architectures": [architecture], "dtype": "bfloat16", **config})
    assert shape.parameters == counted(architecture, config)


@pytest.mark.parametrize("family", BESIDE)
def test_parameters_of_multimodal_models(family):
    architecture, own, vision = BESIDE[family]
    config = dict(text_config={**PLAIN, **own}, vision_config=vision, tie_word_embeddings=False)
    shape = ModelShape.from_hf({"architectures": [architecture], "dtype": "bfloat16", **config})
    assert shape.parameters == counted(architecture, config)
    assert 0 < shape.encoder_parameters == shape.parameters - shape.decoder_parameters


def shape(architecture: str, **changes) -> ModelShape:
    return ModelShape.from_hf({"architectures": [architecture], "dtype": "bfloat16", **PLAIN, **changes})


def test_chatglm_has_other_words_for_the_same():
    other = dict(
        num_layers=5,
        hidden_size=48,
        ffn_hidden_size=80,
        num_attention_heads=4,
        kv_channels=12,
        multi_query_group_num=2,
        padded_vocab_size=96,
        seq_length=256,
        add_qkv_bias=True,
        torch_dtype="bfloat16",
    )
    config = {"architectures": ["ChatGLMModel"], **other}
    glm, qwen = ModelShape.from_hf({**config, "multi_query_attention": True}), shape("Qwen2ForCausalLM")
    assert (glm.parameters, glm.kv_bytes_per_token, glm.max_length) == (qwen.parameters, qwen.kv_bytes_per_token, 256)
    assert ModelShape.from_hf(config).kv_heads == 4


class TestLatent:
    def test_by_hand(self):
        # DeepSeek-V3: 576 elements a token and layer; 128 heads; 61 layers in bf16: 70,272 bytes a token.
        model = ModelShape.read("deepseek-v3")
        assert model.latent == Latent(1536, 512, 128, 64, 128)
        assert model.kv_bytes_per_token_layer == 576 * 2
        assert model.kv_bytes_per_token == 61 * 1152
        assert model.decode_flops == 2 * 128 * (576 + 512)
        assert model.attention_flops == 2 * 128 * (192 + 128)
        assert model.expansion_flops == 2 * 512 * 128 * 256
        assert model.attention_weights == 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168

    def test_a_dense_model_decodes_as_it_prefills(self):
        dense = shape("LlamaForCausalLM")
        assert (dense.decode_flops, dense.expansion_flops) == (dense.attention_flops, 0)


class TestCompressed:
    def model(self) -> ModelShape:
        architecture, own = FAMILIES["deepseek-v4"]
        return shape(architecture, **own)

    def test_what_is_held(self):
        # 12 elements of 128 tokens; (12 + 10) of 4 tokens; nothing but a window.
        assert [self.model().kv_bytes_of(layer) for layer in (0, 1, 2)] == [12 / 128 * 2, 22 / 4 * 2, 0]

    def test_how_far_queries_see(self):
        model = self.model()
        assert model.compressed is not None
        pair = 4 * 4 * 12  # a product and a sum in 4 heads, of 12
        assert model.compressed.reaches(2, 4, 12) == [Reach(8, pair, 12)]
        assert model.compressed.reaches(0, 4, 12) == [Reach(8, pair, 12), Reach(None, pair / 128, 12 / 128)]
        # The indexer's 3 heads of 10 score every entry; the best 4 stand for 16 tokens.
        index, best = Reach(None, 2 * 30 / 4, 10 / 4), Reach(16, pair / 4, 12 / 4)
        assert model.compressed.reaches(1, 4, 12) == [Reach(8, pair, 12), index, best]

    def test_rates_as_published_configs_name_them(self):
        architecture, own = FAMILIES["deepseek-v4"]
        older = {**own, "layer_types": None, "compress_ratios": [128, 4, 0, 4, 128]}
        assert shape(architecture, **older) == self.model()
        with pytest.raises(ValueError, match="layer_types must name one of sliding_attention, compressed_sparse"):
            shape(architecture, **{**own, "layer_types": ["full_attention"] * 5})


class TestExperts:
    def test_of_deepseek(self):
        assert ModelShape.read("deepseek-v3").experts == Experts(256, 8, 2048, 2048, correction=True, dense=(0, 1, 2))
        assert ModelShape.read("deepseek-v3").expert_layers == 58

    def test_dense_layers_of_qwen(self):
        model = shape("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3], **QWEN_EXPERTS)
        assert model.experts and model.experts.dense == (0, 2, 3, 4)
        assert [model.has_experts(layer) for layer in range(5)] == [False, True, False, False, False]

    def test_qwens_count_has_another_name_since_transformers_5(self):
        renamed = {
            "num_local_experts" if name == "num_experts" else name: value for name, value in QWEN_EXPERTS.items()
        }
        assert shape("Qwen3MoeForCausalLM", **renamed).experts == shape("Qwen3MoeForCausalLM", **QWEN_EXPERTS).experts

    @pytest.mark.parametrize(
        ("name", "billions"),
        # As the model cards say; gpt-oss's leave out the table that tokens are looked up in.
        [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("mixtral-8x7b", 12.9), ("deepseek-v3", 37), ("kimi-k2", 32)],
    )
    def test_active_parameters(self, name, billions):
        assert ModelShape.read(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.03)

    def test_more_active_than_there_are(self):
        with pytest.raises(ValueError, match=r"model\.experts\.active=9 must lie in 1\.\.8"):
            shape("Qwen3MoeForCausalLM", **dict(QWEN_EXPERTS, num_experts_per_tok=9))


class TestWindows:
    def test_alternate(self):
        assert ModelShape.read("gpt-oss-20b").windows == (128, None) * 12
        assert shape("Gemma3ForCausalLM", sliding_window=32, num_hidden_layers=7).windows == (32,) * 5 + (None, 32)
        assert shape("Gemma2ForCausalLM", sliding_window=32).windows == (32, None, 32, None, 32)

    def test_as_the_config_switches_them(self):
        assert shape("MistralForCausalLM", sliding_window=32).windows == (32,) * 5
        assert (
            shape("MixtralForCausalLM", sliding_window=None, num_local_experts=4, num_experts_per_tok=2).windows == ()
        )
        assert shape("Qwen2ForCausalLM", sliding_window=32).windows == ()
        on = dict(use_sliding_window=True, sliding_window=32, max_window_layers=3)
        assert shape("Qwen2ForCausalLM", **on).windows == (None, None, None, 32, 32)
        assert shape("MistralForCausalLM", sliding_window=256).windows == ()  # as long as any sequence

    def test_a_cache_that_frees_what_they_hide(self):
        model = ModelShape.read("gpt-oss-20b")
        layer = model.kv_bytes_per_token_layer
        assert model.kv_bytes(100) == 24 * 100 * layer
        assert model.kv_bytes(1000) == 12 * (1000 + 128) * layer
        assert ModelShape.read("qwen3-8b").kv_bytes(1000) == 1000 * ModelShape.read("qwen3-8b").kv_bytes_per_token


def quantised(config: dict) -> Precision:
    return shape("LlamaForCausalLM", quantization_config=config).precision


class TestPrecision:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"quant_method": "awq", "bits": 4, "group_size": 128}, Precision("int4", "int4")),
            ({"quant_method": "gptq", "bits": 8}, Precision("int8", "int8")),
            ({"quant_method": "fp8", "expert_dtype": "fp4"}, Precision("fp8", "mxfp4")),
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Precision("fp8", "fp8")),
            (
                {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
                Precision("nvfp4", "nvfp4", "fp8"),
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "group_0": {"weights": {"type": "int", "num_bits": 8}, "input_activations": {"num_bits": 8}}
                    },
                },
                Precision("int8_a8", "int8_a8"),
            ),
        ],
    )
    def test_as_checkpoints_state_it(self, config, expected):
        assert quantised(config) == expected

    def test_attention_that_is_kept(self):
        assert ModelShape.read("gpt-oss-20b").precision == Precision(None, "mxfp4")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quant_method": "bitsandbytes"}, "quant_method=bitsandbytes is not supported; supported: awq, gptq"),
            ({"quant_method": "awq", "bits": 3}, "bits=3 is not supported with awq; supported: 4, 8"),
            ({"quant_method": "compressed-tensors"}, "weights of type=None num_bits=None are not supported"),
        ],
    )
    def test_what_is_not_known_is_named(self, config, message):
        with pytest.raises(ValueError, match=message) as error:
            quantised(config)
        assert "\n" not in str(error.value)

    def test_bytes_by_hand(self):
        model = ModelShape.read("qwen3-8b")
        matrices, rest = 36 * model.linear_weights, model.parameters - 36 * model.linear_weights
        # 4 bits, and 20 for the scale and zero of 128 elements; tables and norms stay in bf16.
        assert model.quantised("int4").weight_bytes == pytest.approx(matrices * (4 + 20 / 128) / 8 + 2 * rest)
        assert model.quantised("fp8").weight_bytes == pytest.approx(matrices * (1 + 4 / 128**2) + 2 * rest)
        assert model.quantised(kv="fp8").kv_bytes_per_token == model.kv_bytes_per_token // 2
        assert model.quantised(kv="fp8").weight_bytes == model.weight_bytes

    def test_published_sizes_of_checkpoints(self):
        # Model card (arXiv 2508.10925, table 1): checkpoints of 12.8 and 60.8 GiB.
        assert ModelShape.read("gpt-oss-20b").weight_bytes / 1e9 == pytest.approx(12.8 * 1.073741824, rel=0.01)
        assert ModelShape.read("gpt-oss-120b").weight_bytes / 1e9 == pytest.approx(60.8 * 1.073741824, rel=0.01)

    def test_experts_follow_the_other_weights(self):
        model = ModelShape.read("qwen3-30b-a3b", weights="fp8")
        assert model.precision == Precision("fp8", "fp8")
        assert ModelShape.read("qwen3-30b-a3b", experts="int4").precision == Precision(None, "int4")

    def test_a_format_that_there_is_not(self):
        with pytest.raises(ValueError, match=r"model\.kv=fp4 is not supported; supported: null, fp8, bf16"):
            ModelShape.read("qwen3-8b", kv="fp4")
