"""From a Hugging Face folder to a decoder and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import DecoderConfig, find_config, read_config, read_json
from engine.errors import EngineError
from engine.memory import enough_memory, room, whole_or_nothing
from engine.models.decoder import WHOLE, Decoder, Part
from engine.parallel.layout import Layout, Place, local_config
from engine.shard import Cut
from engine.weights import Weights, random_weights, read_weights
from kernels.registry import IMPLEMENTATIONS, Need, chosen, select

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a model: where it is, and whom it speaks to."""

    layout: Layout
    place: Place
    part: Part


LONE = Share(Layout(), Place(0, 0, 0), WHOLE)


def load_model(
    path: str | Path,
    dtype: str = "float32",
    device: str = "cpu",
    kernels: Mapping[str, str] | None = None,
    share: Share = LONE,
) -> Decoder:
    """The decoder of a checkpoint's folder, or a rank's share of it.

    `dtype` is one of `DTYPES`, or `auto` for the checkpoint's own. `kernels` names implementations by operation where
    the fastest is not wanted. What is wrong with the folder is an `EngineError`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise EngineError(f"model.path={path}: no such folder; give a Hugging Face checkpoint's folder")
    config = read_config(folder)
    return _decoder(config, _dtype(dtype, config), device, kernels, partial(read_weights, folder), share)


def random_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    kernels: Mapping[str, str] | None = None,
    seed: int = 0,
    share: Share = LONE,
) -> Decoder:
    """A decoder with the shape of a checkpoint's folder, a `config.json` or a shipped model, and random weights."""
    config = find_config(path)
    return _decoder(config, _dtype(dtype, config), device, kernels, partial(random_weights, seed=seed), share)


def _decoder(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: str,
    kernels: Mapping[str, str] | None,
    weights: Callable[..., Weights],
    share: Share,
) -> Decoder:
    """Operations and sizes first: what cannot be is told before gigabytes are read."""
    whole, local = config.shape, local_config(config, share.layout, share.place)
    layout, seat = share.layout, share.place
    held = None if whole.experts is None else layout.held(seat, whole.experts.count)
    keep = Cut(whole, layout.span(seat.stage, whole.layers), seat.tp_rank, layout.tp, held)
    shape, place = local.shape, _device(device)
    experts = None if whole.experts is None else whole.experts.count
    rank = None if whole.latent is None else whole.latent.kv_rank
    need = Need(dtype, shape.heads, shape.kv_heads, shape.head_dim, shape.hidden, experts, rank)
    for op in ("attention",) if rank is None else ("attention", "mla_attention"):
        _check_attention(op, place, kernels, need)
    ops = select(place.type, kernels, need)
    too_large = (
        f"model: {shape.parameters * dtype.itemsize / 1e9:.1f} GB of weights in {dtype} do not fit the memory of "
        f"{device}, {room(place) / 1e9:.1f} GB; take a smaller model, a smaller dtype or another device"
    )
    if shape.parameters * dtype.itemsize > room(place):
        raise EngineError(too_large)
    with whole_or_nothing(), enough_memory(too_large):
        return Decoder(local, weights(whole, dtype, device, keep=keep), ops, share.part)


def _device(name: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise EngineError(f"device={name}: the engine has no such device; take cpu, cuda or cuda:NUMBER")
    if device.type == "cuda":
        _check_cuda(device)
    return device


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise EngineError(f"device={device}: no CUDA device is visible; take device=cpu, or check nvidia-smi")
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise EngineError(f"device={device}: there are {count} CUDA devices, numbered from 0; take another number")


def _check_attention(op: str, device: torch.device, kernels: Mapping[str, str] | None, need: Need) -> None:
    """On a GPU the reference is no substitute: it asks the host for lengths in every layer."""
    if device.type != "cuda" or op in (kernels or {}) or chosen(op, "cuda", need=need) != "reference":
        return
    entries = IMPLEMENTATIONS[op].items()
    reasons = "; ".join(
        f"{name}: {entry.objection('cuda', need)}" for name, entry in entries if "cuda" in entry.devices
    )
    raise EngineError(f"kernels.{op}: no implementation on a GPU takes this model ({reasons}); take another model")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder, as transformers builds it; an `EngineError` names the file at fault."""
    from transformers import AutoTokenizer  # importing it takes more than a second

    folder = Path(path)
    file = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)
    if file is None:
        raise EngineError(f"{folder / TOKENIZERS[0]}: no such file; the folder must hold its tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # The parsers below raise whatever they run into, plain `Exception` too, and do not say in which file.
        for described in (folder / name for name in ("tokenizer.json", "tokenizer_config.json")):
            if described.is_file():
                read_json(described)
        raise EngineError(f"{file}: no tokenizer can be made of it ({_brief(error)}); fetch it again") from error
    _check_vocabulary(tokenizer, folder, file)
    return tokenizer


def _check_vocabulary(tokenizer: Any, folder: Path, file: Path) -> None:
    """Added tokens are another matter: some checkpoints have more of them than rows, and never use those."""
    rows = read_config(folder).shape.vocabulary
    if tokenizer.vocab_size > rows:
        raise EngineError(
            f"{file}: {tokenizer.vocab_size} tokens, but model.embed_tokens.weight has {rows} rows by config.json; "
            "take the tokenizer that belongs to the model"
        )


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _brief(error: Exception) -> str:
    """The first line of an error's text, at most 200 characters of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _dtype(name: str, config: DecoderConfig) -> torch.dtype:
    name = config.dtype if name == "auto" else name
    if name not in DTYPES:
        raise EngineError(f"model.dtype={name} is not supported; choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]
