"""What can be wrong with a checkpoint's folder, and the one line that says so."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import find_config, read_config
from engine.errors import EngineError
from engine.load import load_model, load_tokenizer
from engine.tiny import tiny
from engine.weights import read_weights


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny Qwen3 checkpoint to spoil."""
    return shutil.copytree(tiny("qwen3"), tmp_path / "checkpoint")


def edit(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def change_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def shard(folder):
    """Cut model.safetensors in two, as large checkpoints are."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return list(parts)


def refused(folder, *parts, call=load_model):
    """The error is one line that holds all of these."""
    with pytest.raises(EngineError) as caught:
        call(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def weights(folder):
    return read_weights(folder, read_config(folder).shape, torch.float32, "cpu")


def test_sharded_equals_single(folder):
    whole = weights(folder)
    shard(folder)
    cut = weights(folder)
    assert torch.equal(cut.layers[3].qkv.weight, whole.layers[3].qkv.weight)
    assert torch.equal(cut.head, whole.head)


def test_dtypes(folder):
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    edit(folder / "config.json", dtype=..., torch_dtype="float16")
    assert load_model(folder, dtype="auto").dtype == torch.float16
    refused(folder, "model.dtype=int8", "float32, bfloat16", call=lambda path: load_model(path, dtype="int8"))


def test_tied_head_is_the_embedding():
    tied = weights(tiny("qwen2"))
    assert tied.head is tied.embedding


def test_a_saved_tied_head_is_no_error(tmp_path):
    folder = shutil.copytree(tiny("qwen2"), tmp_path / "checkpoint")
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, **{"lm_head.weight": head})
    load_model(folder)


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "model.path=", "nowhere: no such folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json: no such file")


def test_broken_config(folder):
    (folder / "config.json").write_text('{"hidden_size": 12')
    refused(folder, "config.json: not valid JSON")


def test_missing_field(folder):
    edit(folder / "config.json", num_hidden_layers=...)
    refused(folder, "config.json", "num_hidden_layers is missing")


def test_unsupported_architecture(folder):
    edit(folder / "config.json", architectures=["GPT2LMHeadModel"])
    refused(folder, "config.json", "GPT2LMHeadModel is not supported", "Qwen3ForCausalLM")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b", "gemma-2-9b"])
def test_what_only_the_simulator_has(name):
    with pytest.raises(EngineError, match=r"is not supported: the engine has Llama.*backend=sim has the costs of more"):
        find_config(name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True, "sliding_window": -1}, "field sliding_window=-1 must be a number above 0"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x' must be an integer"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "a kind for each of the 4 layers"),
        (
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
            "layer_types=chunked_attention is not",
        ),
        ({"layer_types": ["sliding_attention"] * 4}, "names sliding_attention, but no sliding_window is in use"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type=longrope is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type=linear needs factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "rope_parameters.factor='x' is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention={} is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor=0.1 rotates 3 of a head's 32"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5 rotates 48 of a head's 32"),
        ({"rope_theta": "x", "rope_parameters": None}, "field rope_theta='x' must be a number above 0"),
        ({"rms_norm_eps": "x"}, "field rms_norm_eps='x' must be a number above 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_features(folder, changes, said):
    edit(folder / "config.json", **changes)
    refused(folder, "config.json", said)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "holds neither model.safetensors nor model.safetensors.index.json")


def test_legacy_files_are_read(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(weights(folder).embedding, tensors["model.embed_tokens.weight"])
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(weights(folder).embedding, tensors["model.embed_tokens.weight"])
    names = sorted(tensors)
    for number, part in enumerate((names[:20], names[20:])):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    places = {name: f"pytorch_model-{int(name in names[20:])}.bin" for name in names}
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(weights(folder).embedding, tensors["model.embed_tokens.weight"])
    (folder / "pytorch_model-1.bin").write_bytes((folder / "pytorch_model-1.bin").read_bytes()[:-5000])
    refused(folder, "pytorch_model-1.bin: not a whole file of nothing but tensors")


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("content", [{"model.norm.weight": Harmful()}, {"step": 3}, [1]])
def test_legacy_files_run_nothing(folder, content, capsys):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin: ", "take model.safetensors")
    assert "executed" not in capsys.readouterr().out


def test_missing_tensor(folder):
    change_tensors(folder, **{"model.layers.2.mlp.up_proj.weight": None})
    refused(folder, "model.safetensors", "tensor model.layers.2.mlp.up_proj.weight is missing")


def test_extra_tensor(folder):
    change_tensors(folder, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(2)})
    refused(folder, "model.safetensors", "tensor model.layers.9.mlp.up_proj.weight is unknown")


def test_wrong_shape(folder):
    change_tensors(folder, **{"model.norm.weight": torch.zeros(64)})
    refused(folder, "model.safetensors", "tensor model.norm.weight has shape [64], config.json asks for [128]")


@pytest.mark.parametrize("size", [0, 4, 1000, 100_000])
def test_truncated_file(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(folder, "model.safetensors: not a whole safetensors file")


def test_truncated_shard(folder):
    second = folder / shard(folder)[1]
    second.write_bytes(second.read_bytes()[:-10])
    refused(folder, second.name, "not a whole safetensors file")


def test_missing_shard(folder):
    first = folder / shard(folder)[0]
    first.unlink()
    refused(folder, first.name, "no such file, though model.safetensors.index.json names it")


def test_shard_without_its_tensor(folder):
    first = folder / shard(folder)[0]
    tensors = load_file(first)
    tensors.pop("model.embed_tokens.weight")
    save_file(tensors, first)
    refused(folder, first.name, "tensor model.embed_tokens.weight is missing, though")


def test_shard_with_a_tensor_that_the_index_does_not_name(folder):
    first, second = (folder / name for name in shard(folder))
    tensors = load_file(first)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, first)
    load_model(folder)  # a table that some tools save
    save_file({**tensors, "model.layers.9.stray": torch.zeros(2)}, first)
    refused(folder, first.name, "tensor model.layers.9.stray is not in model.safetensors.index.json")
    save_file(tensors, first)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={name: file for name, file in places.items() if name != "model.norm.weight"})
    refused(folder, index.name, "tensor model.norm.weight is missing")
    assert second.is_file()


def test_index_without_a_map(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "model.safetensors.index.json: has no weight_map")


@pytest.mark.parametrize("place", [3, None, "../model.safetensors", "/etc/passwd", ".", ""])
def test_index_that_places_tensors_nowhere(folder, place):
    shard(folder)
    edit(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": place})
    refused(folder, "model.safetensors.index.json: tensor model.norm.weight is placed in", "no file's name")


HEADERS = {
    "garbage": b"{no json",
    "overlap": {"a": ("F32", [0, 8]), "b": ("F32", [4, 12])},
    "beyond the end": {"a": ("F32", [0, 8000])},
    "hole": {"a": ("F32", [4, 12])},
    "unknown dtype": {"a": ("X9", [0, 8])},
}


@pytest.mark.parametrize("name", HEADERS)
def test_broken_headers(folder, name):
    header = HEADERS[name]
    if isinstance(header, dict):
        parts = {key: {"dtype": kind, "shape": [2], "data_offsets": place} for key, (kind, place) in header.items()}
        header = json.dumps(parts).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    refused(folder, "model.safetensors: not a whole safetensors file")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantised_tensors(folder, dtype):
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(256, 128).to(dtype)})
    refused(folder, "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is", str(dtype), "not supported")


@pytest.mark.parametrize("content", [b"", b"hello there", b"PK\x03\x04", bytes(100), b"\x80\x04]\x94."])
def test_legacy_files_that_are_none(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, "pytorch_model.bin: ", "take model.safetensors")


def test_unreadable_files(folder, monkeypatch):
    def deny(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.read_text", deny)
        refused(folder, "config.json: cannot be read (Permission denied)")
    monkeypatch.setattr("engine.weights.safe_open", deny)
    refused(folder, "model.safetensors: not a whole safetensors file", "Permission denied")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "no CUDA device is visible"),
        ("tpu", "the engine has no such device; take cpu, cuda"),
        ("meta", "the engine has no such device; take cpu, cuda"),
        ("x:y", "the engine has no such device; take cpu, cuda"),
    ],
)
def test_devices_that_are_not_there(folder, device, said):
    refused(folder, f"device={device}: ", said, call=lambda path: load_model(path, device=device))


def test_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json: no such file", call=load_tokenizer)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version": "1.0", "trunc', b"\xff\xfe"])
def test_broken_tokenizer(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    refused(folder, "tokenizer.json: ", "again", call=load_tokenizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": "1.0", "trunc'])
def test_which_of_the_tokenizers_files_is_broken(folder, name, content):
    (folder / name).write_bytes(content)
    refused(folder, f"{name}: ", "again", call=load_tokenizer)


def test_tokenizer_of_another_model(folder):
    edit(folder / "config.json", vocab_size=300)
    refused(folder, "tokenizer.json: 512 tokens, but model.embed_tokens.weight has 300 rows", call=load_tokenizer)


def test_added_tokens_may_be_more_than_rows(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<|pad|>"])
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(folder)) == 513


def test_end_tokens(folder):
    assert load_model(folder).config.eos == (2,)
    edit(folder / "generation_config.json", eos_token_id=[2, 0])
    assert load_model(folder).config.eos == (2, 0)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=1)
    assert load_model(folder).config.eos == (1,)
    edit(folder / "config.json", eos_token_id=None)
    assert load_model(folder).config.eos == ()
    edit(folder / "config.json", eos_token_id="</s>")
    refused(folder, "config.json: field eos_token_id='</s>' must be a token's number")
