"""What a checkpoint's `config.json` says beyond its sizes: norms, rotary embedding, biases, the tokens that end it.

It knows no tensor. Defaults are those of the Hugging Face classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from playground.model import Experts, ModelShape, shipped


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind`: default, linear, dynamic, llama3 or yarn; `parameters` are those of the kind."""

    theta: float
    kind: str
    parameters: Mapping[str, Any]
    width: int
    """Elements of a head that rotate, from the first on; the others pass as they are."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Experts are picked from the best groups of them only, so that a token goes to few devices (DeepSeek-V2, V3)."""

    groups: int
    taken: int
    """Groups of a token; as many as there are: all."""
    best: int
    """A group is as good as so many of its best experts together."""
    sigmoid: bool
    """Whether an expert's score is its logit's sigmoid; else the softmax over all."""
    scale: float
    """What the shares are multiplied by in the end."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router picks experts."""

    active: int
    """Experts of a token."""
    normalise: bool
    """Whether the shares of those picked are made to add up to 1."""
    grouped: Grouped | None = None
    """DeepSeek's way to pick them."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that the decoder needs to know to use a folder's tensors."""

    shape: ModelShape
    rms_eps: float
    rope: Rope
    eos: tuple[int, ...]
    """Token ids that end a sequence."""
    dtype: str
    """Of the checkpoint: bfloat16, float16 or float32."""
    windows: tuple[int | None, ...]
    """Tokens that a query sees at most, itself included, layer by layer; None: all.

    What a window hides stays in the pool: KV is counted, and blocks are kept, for whole sequences in every layer.
    """
    routing: Routing | None = None
    """Of models with experts."""


def read_config(folder: Path) -> DecoderConfig:
    """The config of a checkpoint's folder; an `EngineError` names the file and what is wrong in it."""
    path = folder / "config.json"
    config = read_json(path)
    return _decoder_config(config, path, _eos(config, folder))


def find_config(path: str | Path) -> DecoderConfig:
    """The config of a checkpoint's folder, of a `config.json`, or of a model that ships with the playground."""
    if Path(path).is_dir():
        return read_config(Path(path))
    if str(path) in shipped():
        path = Path(str(files("playground").joinpath("models", f"{path}.json")))
    config = read_json(Path(path))
    return _decoder_config(config, Path(path), _end_tokens(config.get("eos_token_id"), Path(path)))


def _decoder_config(config: Mapping[str, Any], path: Path, eos: tuple[int, ...]) -> DecoderConfig:
    _refuse_unsupported(config, path)
    try:
        shape = ModelShape.from_hf(config)
    except ValueError as error:
        raise EngineError(f"{path}: {error}") from error
    return DecoderConfig(
        shape=shape,
        rms_eps=_number(config, "rms_norm_eps", path, 1e-6),
        rope=_rope(config, shape, path),
        eos=eos,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        windows=shape.windows or (None,) * shape.layers,
        routing=None if shape.experts is None else _routing(config, shape.experts, path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there."""
    if not path.is_file():
        raise EngineError(f"{path}: no such file; model.path must be a Hugging Face checkpoint's folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path}: holds a {type(content).__name__}, not an object; fetch the file again")
    return content


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """What a simulation may have costs for and the engine has no code."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        raise EngineError(
            f"{path}: architectures={name} is not supported: the engine has {', '.join(ARCHITECTURES)}; "
            "backend=sim has the costs of more"
        )
    if config.get("quantization_config"):
        raise EngineError(f"{path}: quantization_config: the engine has no quantised weights; use the bf16 checkpoint")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise EngineError(f"{path}: hidden_act={activation} is not supported; the engine has silu only")
    if config.get("rope_interleave") is False:
        raise EngineError(f"{path}: rope_interleave=false is not supported; DeepSeek's own checkpoints interleave")


def _routing(config: Mapping[str, Any], experts: Experts, path: Path) -> Routing:
    normalise = config.get("norm_topk_prob", False)
    if not isinstance(normalise, bool):
        raise EngineError(f"{path}: field norm_topk_prob={normalise!r} must be true or false")
    if not _is_deepseek(config):
        return Routing(experts.active, normalise)
    grouped = _grouped(config, experts, path)
    if normalise and not grouped.sigmoid:
        # The published code and transformers' disagree, and no published model has it.
        raise EngineError(f"{path}: norm_topk_prob=true is not supported in a DeepSeek-V2; take a DeepSeek-V3")
    return Routing(experts.active, normalise, grouped)


def _grouped(config: Mapping[str, Any], experts: Experts, path: Path) -> Grouped:
    """V2 names its method; V3's is fixed, with a correction of scores that is learnt without a loss."""
    newer = experts.correction
    names = ("noaux_tc",) if newer else ("greedy", "group_limited_greedy")
    if (method := config.get("topk_method") or names[0]) not in names:
        raise EngineError(f"{path}: topk_method={method} is not supported; this family has {', '.join(names)}")
    if (scores := config.get("scoring_func") or _SCORES[newer]) != _SCORES[newer]:
        raise EngineError(f"{path}: scoring_func={scores} is not supported; this family has {_SCORES[newer]}")
    groups, taken = (int(config.get(field) or 1) for field in ("n_group", "topk_group"))
    if method == "greedy":
        groups = taken = 1
    if experts.count % groups or not 1 <= taken <= groups or taken * (experts.count // groups) < experts.active:
        raise EngineError(
            f"{path}: n_group={groups}, topk_group={taken}: {experts.active} of {experts.count} experts cannot be "
            "picked from so many groups; mend them"
        )
    scale = _number(config, "routed_scaling_factor", path, 1.0)
    return Grouped(groups, taken, 2 if newer else 1, newer, scale)


_SCORES = {False: "softmax", True: "sigmoid"}


def _is_deepseek(config: Mapping[str, Any]) -> bool:
    return str(config["architectures"]).find("Deepseek") >= 0


def _rope(config: Mapping[str, Any], shape: ModelShape, path: Path) -> Rope:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` of older files."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, dict):
        raise EngineError(f"{path}: rope_parameters={stated!r} must be an object; fetch the file again")
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind not in _NEEDED:
        # "longrope" changes with the longest sequence of a batch: tokens would depend on batching.
        raise EngineError(f"{path}: rope_type={kind} is not supported; the engine has {', '.join(_NEEDED)}")
    parameters = {"original_max_position_embeddings": shape.max_length, **stated}
    if missing := [name for name in _NEEDED[kind] if parameters.get(name) is None]:
        raise EngineError(f"{path}: rope_type={kind} needs {', '.join(missing)} in rope_parameters")
    for name, value in stated.items():
        if name not in ("rope_type", "type") and not isinstance(value, int | float | None):
            raise EngineError(f"{path}: rope_parameters.{name}={value!r} is not supported; it must be a number")
    theta = _number({**config, **stated}, "rope_theta", path, 10000.0)
    return Rope(theta, kind, parameters, _rotary_width({**config, **stated}, shape, path))


def _rotary_width(config: Mapping[str, Any], shape: ModelShape, path: Path) -> int:
    """A part of each head, as in vLLM; transformers' own classes of these families leave such configs unsupported."""
    if shape.latent is not None:
        return shape.latent.rope
    share = _number(config, "partial_rotary_factor", path, 1.0)
    width = int(shape.head_dim * share)
    if not 0 < width <= shape.head_dim or width % 2:
        raise EngineError(
            f"{path}: partial_rotary_factor={share} rotates {width} of a head's {shape.head_dim} elements; it must be "
            "an even number of them"
        )
    return width


def _number(config: Mapping[str, Any], field: str, path: Path, default: float | None = None) -> float:
    """A number above 0."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise EngineError(f"{path}: field {field}={value!r} must be a number above 0")
    return value


ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
# "dynamic" stretches what is longer than `max_position_embeddings` only, which no sequence is here.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _eos(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End tokens. `generation_config.json` has the last word: chat models end turns with a token of their own."""
    path = folder / "generation_config.json"
    stated = read_json(path).get("eos_token_id") if path.is_file() else None
    if stated is not None:
        return _end_tokens(stated, path)
    return _end_tokens(config.get("eos_token_id"), folder / "config.json")


def _end_tokens(stated: Any, path: Path) -> tuple[int, ...]:
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if odd := [id for id in ids if not isinstance(id, int)]:
        raise EngineError(f"{path}: field eos_token_id={odd[0]!r} must be a token's number, or several in a list")
    return tuple(ids)
