"""Model shapes: sizes against published parameter counts, and one clear line for what cannot be read."""

import json
import re
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from playground.model import ModelShape, Precision, shipped

# As the checkpoints' safetensors headers add up; those with experts, windows or an encoder as transformers' classes
# count, plus DeepSeek's correction of routing, a buffer there. `test_model_families` compares each family so.
PARAMETERS = {
    "chatglm3-6b": 6_243_584_000,
    "codellama-34b": 33_743_970_304,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v3.2": 671_877_944_064,
    "gemma-2-9b": 9_241_705_984,
    "glm-4-9b": 9_400_279_040,
    "glm-4.7": 352_797_829_024,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "kimi-k2": 1_026_408_232_448,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llava-1.5-7b": 7_063_427_072,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_110_208,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-vl-8b": 8_767_123_696,
    "smollm2-135m": 134_515_008,
}


def config(**changes):
    base = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
    }
    merged = base | changes
    return {key: value for key, value in merged.items() if value is not None}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_published_models(name):
    shape = ModelShape.read(name)
    assert shape.parameters == PARAMETERS[name]
    if shape.precision == Precision():
        assert shape.weight_bytes == 2 * PARAMETERS[name]


def test_every_shipped_model_is_checked_and_listed():
    assert set(shipped()) == {*PARAMETERS, "tiny"}
    (row,) = (
        line for line in Path("README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `model`")
    )
    named = {name for name in re.findall(r"`([^`]+)`", row) if "=" not in name}
    assert named - {"model"} == set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_every_yaml_builds_the_model_of_its_name(name):
    shape = instantiate(OmegaConf.load(f"conf/model/{name}.yaml"))
    assert shape == ModelShape.read(name)


def test_sizes_by_hand():
    shape = ModelShape.from_hf(config())
    assert shape.head_dim == 2  # 8 / 4
    # q 8x8, k 8x4, v 8x4, o 8x8 = 192; gate, up, down 3 x 8x16 = 384.
    assert shape.attention_weights == 192
    assert shape.mlp_weights == 384
    assert shape.layer_parameters == 192 + 384 + 2 * 8
    assert shape.parameters == 2 * 10 * 8 + 3 * 592 + 8
    assert shape.kv_bytes_per_token_layer == 2 * 2 * 2 * 2  # keys and values, 2 heads, 2 wide, 2 bytes
    assert shape.kv_bytes_per_token == 3 * 16
    assert shape.linear_flops == 2 * 576
    assert shape.attention_flops == 4 * 4 * 2
    assert shape.head_flops == 2 * 80


def test_biases_by_hand():
    plain = ModelShape.from_hf(config()).layer_parameters
    # query 8 + key 4 + value 4
    assert ModelShape.from_hf(config(architectures=["Qwen2ForCausalLM"])).layer_parameters == plain + 16
    # two norms as wide as a head
    assert ModelShape.from_hf(config(architectures=["Qwen3ForCausalLM"], head_dim=2)).layer_parameters == plain + 4
    # with the output's 8, and gate 16 + up 16 + down 8
    llama = ModelShape.from_hf(config(attention_bias=True, mlp_bias=True))
    assert llama.layer_parameters == plain + 16 + 8 + 40


def test_tied_tables_count_once_and_are_read_whole():
    tied = ModelShape.from_hf(config(tie_word_embeddings=True))
    assert tied.parameters == ModelShape.from_hf(config()).parameters - 80
    assert tied.head_bytes == 160


def test_defaults_are_those_of_transformers():
    assert ModelShape.from_hf(config(num_key_value_heads=None)).kv_heads == 4
    assert ModelShape.from_hf(config(head_dim=16)).query_width == 64
    assert ModelShape.from_hf(config(architectures=["Qwen3ForCausalLM"])).head_dim == 128
    assert ModelShape.from_hf(config(torch_dtype=None)).dtype_bytes == 4
    assert ModelShape.from_hf(config(torch_dtype=None, dtype="torch.float16")).dtype_bytes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5Model"]}, "architectures=T5Model is not supported; supported: Ll"),
        ({"architectures": ["MixtralForCausalLM"]}, "field num_local_experts is missing"),
        ({"architectures": None}, "architectures=None is not supported"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"num_hidden_layers": "3"}, "field num_hidden_layers='3' must be an integer of at least 1"),
        ({"vocab_size": 0}, "field vocab_size=0 must be an integer of at least 1"),
        ({"torch_dtype": "float8"}, "dtype=float8 is not supported; supported: bfloat16, float16, float32"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config.quant_method=None is not supported; supported: awq",
        ),
        ({"num_key_value_heads": 3}, "model.heads=4 must be a multiple of model.kv_heads=3"),
    ],
)
def test_what_a_config_lacks_is_named(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        ModelShape.from_hf(config(**changes))
    assert "\n" not in str(error.value)


def test_read_takes_a_folder_or_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert ModelShape.read(tmp_path) == ModelShape.read(str(tmp_path / "config.json")) == ModelShape.from_hf(config())


def test_read_names_the_path_and_the_choices(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=qwen9: no such folder, file or model; .* qwen3-8b"):
        ModelShape.read("qwen9")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ModelShape.read(tmp_path)


def test_read_names_the_file_at_fault(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"not valid JSON.*config\.json"):
        ModelShape.read(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        ModelShape.read(tmp_path)
    file.write_text(json.dumps(config(vocab_size=None)))
    with pytest.raises(ValueError, match=r"field vocab_size is missing.*config\.json"):
        ModelShape.read(tmp_path)
