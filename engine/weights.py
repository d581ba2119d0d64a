"""Weights of a decoder, read from a Hugging Face folder: safetensors, or legacy pickles, of which nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import read_json
from engine.errors import EngineError
from playground.model import Experts, Latent, ModelShape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LEGACY, LEGACY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Linear(NamedTuple):
    """A projection: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None


class ExpertWeights(NamedTuple):
    """A mixture of experts: E of them, each as wide as `width`."""

    router: Tensor
    """[E, hidden]."""
    gate_up: Tensor
    """Gates over ups, [E, 2 * width, hidden]."""
    down: Tensor
    """[E, hidden, width]."""
    shared_gate: Tensor | None
    """How much of the shared experts a token gets, [1, hidden]; None: all."""
    correction: Tensor | None = None
    """Added to scores where experts are picked (DeepSeek-V3), [E] float32."""


class LatentWeights(NamedTuple):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1). Its rotating elements are in halves, as `rotate` pairs."""

    down: Linear
    """Compressed queries (or, if they are not, all heads'), compressed keys and values, and the keys' rotated part."""
    query_norm: Tensor | None
    queries: Tensor | None
    """From compressed queries to those of all heads, [heads * (nope + rope), query_rank]."""
    kv_norm: Tensor
    keys: Tensor
    """From the compressed vector, [heads, nope, kv_rank]."""
    values: Tensor
    """Likewise, [heads, value, kv_rank]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, with projections of the same input merged into one matrix."""

    attention_norm: Tensor
    qkv: Linear | None
    """Queries, keys and values of all heads, in this order; None: latent attention has others."""
    qk_norm: Tensor | None
    """Norm weights of every query and key head, [heads + kv_heads, head_dim]."""
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear | None
    """Of the MLP, or of the experts that all tokens share; None: there are none of these."""
    down: Linear | None
    experts: ExpertWeights | None = None
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """A decoder, or one rank's part of it; `head` is `embedding` itself where they are tied.

    Only the first stage of a pipeline has an embedding, only the last one norm and head.
    """

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None
    head: Tensor | None


class Keep(Protocol):
    """What of a model a rank keeps: see `engine.shard.Cut`."""

    @property
    def layers(self) -> range: ...

    @property
    def first(self) -> bool: ...

    @property
    def last(self) -> bool: ...

    def layer(self, whole: LayerWeights) -> LayerWeights: ...

    def vocabulary(self, table: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Everything:
    """A lone rank keeps all."""

    layers: range
    first = last = True

    def layer(self, whole: LayerWeights) -> LayerWeights:
        return whole

    def vocabulary(self, table: Tensor) -> Tensor:
        return table


class Checkpoint:
    """The tensors of a folder, taken one by one under their names; what nobody takes is an error at the end."""

    def __init__(self, folder: Path) -> None:
        self._index, self._files = _tensor_files(folder)
        self._open = {file: _opened(file) for file in dict.fromkeys(self._files.values())}
        self._left = {name: file for file, content in self._open.items() for name in content.keys()}  # noqa: SIM118

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor that must be there and have this shape."""
        if name not in self._files:
            raise EngineError(f"{self._index}: tensor {name} is missing; the checkpoint does not fit its config.json")
        self._left.pop(name, None)
        file = self._files[name]
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, AttributeError, TypeError) as error:  # the latter: dtypes that this torch has not
            raise EngineError(f"{file}: tensor {name} cannot be read ({error}); fetch the file again") from error
        if tensor.dtype not in PLAIN or tensor.layout != torch.strided:
            kind = tensor.layout if tensor.dtype in PLAIN else tensor.dtype
            raise EngineError(
                f"{file}: tensor {name} is {kind}; quantised and sparse checkpoints are not supported, take one in "
                "bfloat16, float16 or float32"
            )
        if tensor.shape != shape:
            raise EngineError(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        return tensor

    def refuse_leftovers(self, *harmless: str) -> None:
        """Tensors that were not taken mean another model, unless their names end in one of `harmless`."""
        for name, file in self._left.items():
            if not name.endswith(harmless):
                stray = "not in " + self._index.name if name not in self._files else "unknown to this architecture"
                raise EngineError(f"{file}: tensor {name} is {stray}; check config.json, or fetch the checkpoint again")


def read_weights(
    folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device | str, keep: Keep | None = None
) -> Weights:
    """A rank's tensors of a checkpoint, as `dtype` on `device`; an `EngineError` names the file and the tensor."""
    keep = keep or Everything(range(shape.layers))
    reader = _Reader(Checkpoint(folder), shape, dtype, torch.device(device))
    table = (shape.vocabulary, shape.hidden)
    tied = shape.tied_embeddings
    embedding = head = norm = None
    if keep.first or (keep.last and tied):
        embedding = keep.vocabulary(reader.tensor("model.embed_tokens.weight", *table))
    layers = tuple([keep.layer(reader.layer(index)) for index in keep.layers])
    if keep.last:
        norm = reader.tensor("model.norm.weight", shape.hidden)
        head = embedding if tied else keep.vocabulary(reader.tensor("lm_head.weight", *table))
    if keep.first and keep.last:
        # Tied heads and rotary tables are saved by some tools although they follow from the rest.
        reader.checkpoint.refuse_leftovers("rotary_emb.inv_freq", *(["lm_head.weight"] if tied else []))
    return Weights(embedding if keep.first else None, layers, norm, head)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Names and shapes of the Llama family's tensors."""

    checkpoint: Checkpoint
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(name, *shape).to(self.device, self.dtype)

    def layer(self, index: int) -> LayerWeights:
        prefix, shape = f"model.layers.{index}", self.shape
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {"q_proj": shape.query_width, "k_proj": shape.kv_width, "v_proj": shape.kv_width}
        experts = self._experts(mlp, shape.experts) if shape.experts and shape.has_experts(index) else None
        shared = "shared_experts" if shape.latent else "shared_expert"
        gate_up, down = self._mlp(mlp) if experts is None else self._shared(f"{mlp}.{shared}")
        values = shape.query_width if shape.latent is None else shape.heads * shape.latent.value
        return LayerWeights(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight", shape.hidden),
            qkv=self._merged(attention, qkv, shape.hidden, shape.attention_bias) if shape.latent is None else None,
            qk_norm=self._qk_norm(attention) if shape.qk_norm else None,
            out=self._merged(attention, {"o_proj": shape.hidden}, values, shape.output_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden),
            gate_up=gate_up,
            down=down,
            experts=experts,
            latent=None if shape.latent is None else self._latent(attention, shape.latent),
        )

    def _latent(self, prefix: str, sizes: Latent) -> LatentWeights:
        """Checkpoints have rotating neighbours side by side: these rows are put into halves, of queries and keys."""
        shape, rank = self.shape, sizes.query_rank
        heads, width = shape.heads, sizes.nope + sizes.rope
        source, bias = ("q_proj", False) if rank is None else ("q_a_proj", shape.attention_bias)
        first = self._merged(prefix, {source: heads * width if rank is None else rank}, shape.hidden, bias)
        second = self._merged(prefix, {"kv_a_proj_with_mqa": sizes.cached}, shape.hidden, shape.attention_bias)
        queries = None if rank is None else self.tensor(f"{prefix}.q_b_proj.weight", heads * width, rank)
        if queries is None:
            first = Linear(in_halves(first.weight, heads, sizes.rope), first.bias)
        both = self.tensor(f"{prefix}.kv_b_proj.weight", heads * (sizes.nope + sizes.value), sizes.kv_rank)
        keys, values = both.unflatten(0, (heads, -1)).split((sizes.nope, sizes.value), 1)
        bias_in_halves = None if second.bias is None else in_halves(second.bias, 1, sizes.rope)
        second = Linear(in_halves(second.weight, 1, sizes.rope), bias_in_halves)
        return LatentWeights(
            down=_under_one_another(first, second),
            query_norm=None if rank is None else self.tensor(f"{prefix}.q_a_layernorm.weight", rank),
            queries=None if queries is None else in_halves(queries, heads, sizes.rope),
            kv_norm=self.tensor(f"{prefix}.kv_a_layernorm.weight", sizes.kv_rank),
            keys=keys.contiguous(),
            values=values.contiguous(),
        )

    def _mlp(self, prefix: str) -> tuple[Linear, Linear]:
        return self._gated(prefix, self.shape.intermediate, self.shape.mlp_bias)

    def _shared(self, prefix: str) -> tuple[Linear, Linear] | tuple[None, None]:
        experts = self.shape.experts
        return self._gated(prefix, experts.shared, False) if experts and experts.shared else (None, None)

    def _gated(self, prefix: str, width: int, biased: bool) -> tuple[Linear, Linear]:
        hidden, gate_up = self.shape.hidden, {"gate_proj": width, "up_proj": width}
        down = self._merged(prefix, {"down_proj": hidden}, width, biased)
        return self._merged(prefix, gate_up, hidden, biased), down

    def _experts(self, prefix: str, sizes: Experts) -> ExpertWeights:
        """Each expert goes to its place at once: all of a layer are too many to have twice."""
        hidden, width = self.shape.hidden, sizes.intermediate
        gate_up, down = (self._room(sizes.count, *size) for size in ((2, width, hidden), (hidden, width)))
        for index in range(sizes.count):
            name = f"{prefix}.experts.{index}"
            gate_up[index, 0] = self.checkpoint.take(f"{name}.gate_proj.weight", width, hidden)
            gate_up[index, 1] = self.checkpoint.take(f"{name}.up_proj.weight", width, hidden)
            down[index] = self.checkpoint.take(f"{name}.down_proj.weight", hidden, width)
        return ExpertWeights(
            router=self.tensor(f"{prefix}.gate.weight", sizes.count, hidden),
            gate_up=gate_up.flatten(1, 2),
            down=down,
            shared_gate=self.tensor(f"{prefix}.shared_expert_gate.weight", 1, hidden) if sizes.shared_gate else None,
            correction=self._correction(prefix, sizes.count) if sizes.correction else None,
        )

    def _correction(self, prefix: str, count: int) -> Tensor:
        """In float32 whatever the model is in: it decides between near equals."""
        return self.checkpoint.take(f"{prefix}.gate.e_score_correction_bias", count).to(self.device, torch.float32)

    def _room(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _merged(self, prefix: str, widths: dict[str, int], inputs: int, biased: bool) -> Linear:
        """Projections of one input, one under another; `widths` are their outputs by name."""
        weights = [self.tensor(f"{prefix}.{name}.weight", width, inputs) for name, width in widths.items()]
        if not biased:
            return Linear(_joined(weights), None)
        biases = [self.tensor(f"{prefix}.{name}.bias", width) for name, width in widths.items()]
        return Linear(_joined(weights), _joined(biases))

    def _qk_norm(self, prefix: str) -> Tensor:
        shape = self.shape
        queries = self.tensor(f"{prefix}.q_norm.weight", shape.head_dim).expand(shape.heads, -1)
        keys = self.tensor(f"{prefix}.k_norm.weight", shape.head_dim).expand(shape.kv_heads, -1)
        return torch.cat((queries, keys))


def random_weights(
    shape: ModelShape, dtype: torch.dtype, device: torch.device | str, seed: int = 0, keep: Keep | None = None
) -> Weights:
    """Weights drawn on the device itself, the same for the same seed and kind of device, whatever is kept of them.

    They are scaled so that what the layers compute neither vanishes nor explodes, and greedy text goes on and on.
    """
    keep = keep or Everything(range(shape.layers))
    draw = _Draw(shape, dtype, torch.device(device), torch.Generator(device).manual_seed(seed))
    head = keep.vocabulary(draw.projection(shape.vocabulary, shape.hidden, gain=4.5).weight)
    tied = shape.tied_embeddings
    embedding = head if tied else keep.vocabulary(draw.normal(shape.vocabulary, shape.hidden, deviation=0.4))
    drawn = ((index, draw.layer(index)) for index in range(shape.layers))
    layers = tuple([keep.layer(layer) for index, layer in drawn if index in keep.layers])
    norm = draw.around(1.0, shape.hidden)
    return Weights(embedding if keep.first else None, layers, norm if keep.last else None, head if keep.last else None)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Random tensors in the order they are asked for; gains are those of the tiny checkpoints."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def layer(self, index: int) -> LayerWeights:
        shape = self.shape
        mixed = shape.experts if shape.has_experts(index) else None
        width, biased = (shape.intermediate, shape.mlp_bias) if mixed is None else (mixed.shared, False)
        queries_keys, qkv = (shape.heads + shape.kv_heads, shape.head_dim), shape.query_width + 2 * shape.kv_width
        values = shape.heads * shape.latent.value if shape.latent else shape.query_width
        return LayerWeights(
            attention_norm=self.around(1.0, shape.hidden),
            qkv=None if shape.latent else self.projection(qkv, shape.hidden, 2.0, shape.attention_bias),
            qk_norm=self.around(1.5, *queries_keys) if shape.qk_norm else None,
            out=self.projection(shape.hidden, values, 1.5, shape.output_bias),
            mlp_norm=self.around(1.0, shape.hidden),
            gate_up=self.projection(2 * width, shape.hidden, 1.5, biased) if width else None,
            down=self.projection(shape.hidden, width, 1.0, biased) if width else None,
            experts=None if mixed is None else self.experts(mixed),
            latent=None if shape.latent is None else self.latent(shape.latent),
        )

    def latent(self, sizes: Latent) -> LatentWeights:
        shape, rank = self.shape, sizes.query_rank
        width = shape.heads * (sizes.nope + sizes.rope)
        values = self.normal(shape.heads, sizes.value, sizes.kv_rank, deviation=2.0 * sizes.kv_rank**-0.5)
        return LatentWeights(
            down=self.projection((rank or width) + sizes.cached, shape.hidden, 2.0, shape.attention_bias),
            query_norm=self.around(1.0, rank) if rank else None,
            queries=self.projection(width, rank, 2.0).weight if rank else None,
            kv_norm=self.around(1.0, sizes.kv_rank),
            keys=self.normal(shape.heads, sizes.nope, sizes.kv_rank, deviation=2.0 * sizes.kv_rank**-0.5),
            values=values,
        )

    def experts(self, sizes: Experts) -> ExpertWeights:
        hidden, width = self.shape.hidden, sizes.intermediate
        return ExpertWeights(
            router=self.projection(sizes.count, hidden, 1.5).weight,
            gate_up=self.normal(sizes.count, 2 * width, hidden, deviation=1.5 * hidden**-0.5),
            down=self.normal(sizes.count, hidden, width, deviation=width**-0.5),
            shared_gate=self.projection(1, hidden, 1.0).weight if sizes.shared_gate else None,
            correction=self.around(0.0, sizes.count).float() if sizes.correction else None,
        )

    def projection(self, outputs: int, inputs: int, gain: float, biased: bool = False) -> Linear:
        """[outputs, inputs] that turns inputs of deviation 1 into outputs of deviation `gain`."""
        weight = self.normal(outputs, inputs, deviation=gain * inputs**-0.5)
        return Linear(weight, self.around(0.0, outputs) if biased else None)

    def around(self, mean: float, *size: int) -> Tensor:
        return self.normal(*size, deviation=0.2, mean=mean)

    def normal(self, *size: int, deviation: float, mean: float = 0.0) -> Tensor:
        empty = torch.empty(size, dtype=self.dtype, device=self.device)
        return empty.normal_(mean, deviation, generator=self.generator)


def in_halves(rows: Tensor, heads: int, rope: int) -> Tensor:
    """The last `rope` rows of each head, neighbours of which rotate together, as one half above the other."""
    parts = rows.unflatten(0, (heads, -1))
    turned = parts[:, -rope:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((parts[:, :-rope], turned), 1).flatten(0, 1)


def _under_one_another(first: Linear, second: Linear) -> Linear:
    weight = torch.cat((first.weight, second.weight))
    if first.bias is None and second.bias is None:
        return Linear(weight, None)
    biases = (weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in (first, second))
    return Linear(weight, torch.cat(tuple(biases)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tensor_files(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The file that lists the tensors, and the file of each tensor by name."""
    for single, index in ((SINGLE, INDEX), (LEGACY, LEGACY_INDEX)):
        if (file := folder / single).is_file():
            return file, dict.fromkeys(_opened(file).keys(), file)
        if (file := folder / index).is_file():
            return file, _sharded(file)
    raise EngineError(
        f"{folder}: holds neither {SINGLE} nor {INDEX} (nor {LEGACY}); model.path must be a checkpoint's folder"
    )


def _sharded(index: Path) -> dict[str, Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise EngineError(f"{index}: has no weight_map; fetch the file again")
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise EngineError(f"{index}: tensor {name} is placed in {file!r}, no file's name; fetch the index again")
    files = {name: index.parent / file for name, file in places.items()}
    held = {file: set(_opened(file).keys()) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in held[file]:
            raise EngineError(f"{file}: tensor {name} is missing, though {index.name} places it here; fetch it again")
    return files


def _opened(file: Path) -> Any:
    """What has `keys` and `get_tensor`. A safetensors file's header vouches for the file's length."""
    if not file.is_file():
        index = LEGACY_INDEX if file.suffix == ".bin" else INDEX
        raise EngineError(f"{file}: no such file, though {index} names it; fetch the missing shard")
    if file.suffix == ".bin":
        return _Legacy(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{file}: not a whole safetensors file ({error}); fetch it again") from error


class _Legacy:
    """A pickled file, of which torch reads tensors and refuses everything that would run code."""

    def __init__(self, file: Path) -> None:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        except Exception as error:
            # Garbage makes an unpickler raise whatever it runs into.
            unsafe = isinstance(error, UnpicklingError)
            why = "no pickle of tensors alone; nothing else is ever run" if unsafe else _first_sentence(error)
            raise EngineError(f"{file}: not a whole file of nothing but tensors ({why}); take {SINGLE}") from error
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise EngineError(f"{file}: holds other things than named tensors; take {SINGLE}")
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(". ")[0]
    return text if " " in text else type(error).__name__
