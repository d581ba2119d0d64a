"""The sizes of a decoder, and what follows from them: parameters, bytes, FLOPs. Found by name, folder or file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from playground.model.families import read_sizes
from playground.model.parts import Compressed, Experts, Indexer, Latent
from playground.model.precision import Precision, read_precision


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer with gated MLPs or experts. Lengths in tokens, widths in elements."""

    architecture: str
    """As in `architectures[0]`: LlamaForCausalLM, Qwen3MoeForCausalLM, DeepseekV3ForCausalLM, ..."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of an MLP: of the layers that have no experts."""
    vocabulary: int
    tied_embeddings: bool = False
    attention_bias: bool = False
    """On the query, key and value projections."""
    output_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    max_length: int = 1 << 20
    dtype_bytes: int = 2
    norms: int = 2
    """Of the hidden state, in a layer: four where what attention and MLP return is normalised, too."""
    sinks: bool = False
    """One learned logit a head (gpt-oss)."""
    windows: tuple[int | None, ...] = ()
    """Tokens that a query sees at most, itself included, layer by layer; None: all. Empty: all, in every layer."""
    latent: Latent | None = None
    indexer: Indexer | None = None
    """Of latent attention that sees only the best keys."""
    compressed: Compressed | None = None
    experts: Experts | None = None
    streams: int = 1
    """Residual streams, mixed before and after attention and MLP (DeepSeek-V4's hyper-connections)."""
    encoder_parameters: int = 0
    """Beside the decoder, for images: they take memory."""
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "max_length"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"model.{name}={value} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")
        if self.dtype_bytes not in (1, 2, 4):
            raise ValueError(f"model.dtype_bytes={self.dtype_bytes} must be 1, 2 or 4")
        if len(self.windows) not in (0, self.layers):
            raise ValueError(
                f"model.windows has {len(self.windows)} entries; give one for each of {self.layers} layers"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that the content of a `config.json` describes; a `ValueError` names what is wrong in it."""
        return cls(**read_sizes(config), precision=read_precision(config))

    @classmethod
    def read(
        cls, path: str | Path, weights: str | None = None, experts: str | None = None, kv: str | None = None
    ) -> ModelShape:
        """From a checkpoint's folder, a `config.json` file, or the name of a model that ships with the playground.

        `weights` (of all matrices but routed experts), `experts` (default: as `weights`) and `kv` are number formats
        to take in place of the checkpoint's: see `precision`. They cost bytes and time; nothing is converted.
        """
        file = _find(path)
        try:
            shape = cls.from_hf(_parse(file.read_bytes()))
        except ValueError as error:
            raise ValueError(f"model.path={path}: {error} (in {file})") from error
        except OSError as error:
            raise ValueError(f"model.path={path}: {file} cannot be read ({error.strerror})") from error
        return shape.quantised(weights, experts, kv)

    def quantised(self, weights: str | None = None, experts: str | None = None, kv: str | None = None) -> ModelShape:
        """The same model with these formats where one is given; experts follow the other weights."""
        own = self.precision
        experts = experts or weights or own.experts
        return replace(self, precision=Precision(weights or own.weights, experts, kv or own.kv))

    # What each layer is.

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense

    @property
    def expert_layers(self) -> int:
        return sum(map(self.has_experts, range(self.layers)))

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees at most; None: all."""
        return self.windows[layer] if self.windows else None

    # Parameters, in elements.

    @property
    def query_width(self) -> int:
        """Width of all query heads together; it may differ from `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer; the values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Matrix elements of the first layer's attention; the others' are as many but for compressed attention."""
        return self.attention_matrices(0)

    def attention_matrices(self, layer: int) -> int:
        """Matrix elements of a layer's query, key, value and output projections, and of what compresses them."""
        if self.compressed:
            heads = self.compressed.head_weights(layer, self.hidden, self.heads, self.head_dim)
            return self.whole_weights(layer) + heads
        if self.latent:
            return self.latent.weights(self.hidden, self.heads) + self._indexer_weights
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    def whole_weights(self, layer: int) -> int:
        """Those of them that belong to no head: each tensor-parallel rank holds them all."""
        if self.compressed:
            return self.compressed.compression_weights(layer, self.hidden, self.head_dim)
        return self.latent.compression_weights(self.hidden) + self._indexer_weights if self.latent else 0

    @property
    def _indexer_weights(self) -> int:
        if not (self.indexer and self.latent):
            return 0
        return self.indexer.weights(self.hidden, self.latent.query_rank or self.hidden)

    @property
    def mlp_weights(self) -> int:
        """Matrix elements of one layer's gate, up and down projections, where it has an MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def linear_weights(self) -> int:
        """Matrix elements of one layer with an MLP: each is read once a step and used in one multiply-add per token."""
        return self.attention_weights + self.mlp_weights

    @property
    def expert_weights(self) -> int:
        """Matrix elements of one routed expert; 0 without."""
        return self.experts.weights(self.hidden) if self.experts else 0

    @property
    def common_weights(self) -> int:
        """Matrix elements of one layer's router and shared experts, which every token meets; 0 without experts."""
        return self.experts.common_weights(self.hidden) if self.experts else 0

    @property
    def mixing_parameters(self) -> int:
        """Elements of what mixes the residual streams before and after attention and MLP of one layer; 0 if one."""
        count = self.streams * (self.streams + 2)
        return 2 * (count * self.streams * self.hidden + count + 3) if self.streams > 1 else 0

    @property
    def joining_parameters(self) -> int:
        """Elements of what makes one of the streams before the head; 0 if there is but one."""
        return self.streams * (self.streams * self.hidden + 1) + 1 if self.streams > 1 else 0

    @property
    def attention_vectors(self) -> int:
        """Elements of the first layer's biases and norms about attention, and its sinks."""
        return self.attention_vector(0)

    def attention_vector(self, layer: int) -> int:
        """Elements of a layer's biases and norms about attention, and its sinks."""
        if self.compressed:
            return self.compressed.vectors(layer, self.heads, self.head_dim)
        biases = self.output_bias * self.hidden + self.sinks * self.heads
        if self.latent:
            made = (self.latent.query_rank or 0) + self.latent.kv_rank
            bias = (self.latent.query_rank or 0) + self.latent.cached
            chosen = self.indexer.vectors if self.indexer else 0
            return made + self.attention_bias * bias + biases + chosen
        return self.attention_bias * (self.query_width + 2 * self.kv_width) + biases + self.qk_norm * 2 * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Matrices, biases and norms of one layer with an MLP."""
        biases = self.mlp_bias * (2 * self.intermediate + self.hidden)
        around = self.norms * self.hidden + self.mixing_parameters
        return self.linear_weights + self.attention_vectors + biases + around

    @property
    def expert_layer_parameters(self) -> int:
        """Matrices, biases and norms of one layer with experts; 0 if there are none."""
        if self.experts is None:
            return 0
        routed = self.experts.count * self.expert_weights + self.common_weights + self.experts.vectors(self.hidden)
        around = self.norms * self.hidden + self.mixing_parameters
        return self.attention_weights + self.attention_vectors + routed + around

    @property
    def embedding_parameters(self) -> int:
        """The embedding table; the language-model head is a matrix of the same size."""
        return self.vocabulary * self.hidden

    @property
    def decoder_parameters(self) -> int:
        """All layers, tables and the last norm; a head tied to the embedding counts once."""
        tables = 1 if self.tied_embeddings else 2
        layers = self.expert_layers * self.expert_layer_parameters
        layers += (self.layers - self.expert_layers) * self.layer_parameters
        more = sum(map(self._beyond_first, range(self.layers)))
        return tables * self.embedding_parameters + layers + more + self.hidden + self.joining_parameters

    def _beyond_first(self, layer: int) -> int:
        """Elements that a layer's attention has more than the first one's."""
        own = self.attention_matrices(layer) + self.attention_vector(layer)
        return own - self.attention_weights - self.attention_vectors

    @property
    def parameters(self) -> int:
        """All parameters of the checkpoint but those that predict more than the next token."""
        return self.decoder_parameters + self.encoder_parameters

    @property
    def active_parameters(self) -> int:
        """What one token meets: all of the decoder but the experts that it is not routed to."""
        if self.experts is None:
            return self.decoder_parameters
        idle = self.experts.count - self.experts.active
        return self.decoder_parameters - self.expert_layers * idle * self.expert_weights

    # Bytes.

    @property
    def layer_bytes(self) -> float:
        """Of one layer with an MLP."""
        return self._bytes(self.linear_weights, self.layer_parameters)

    @property
    def expert_layer_bytes(self) -> float:
        """Of one layer with experts; 0 if there are none."""
        if self.experts is None:
            return 0
        routed = self.experts.count * self.expert_weights
        shared = 3 * self.hidden * self.experts.shared
        rest = self._bytes(self.attention_weights + shared, self.expert_layer_parameters - routed)
        return rest + self.experts.count * self.expert_bytes

    @property
    def expert_bytes(self) -> float:
        """Of one routed expert; 0 without."""
        return self.expert_weights * self.precision.expert_bytes(self.dtype_bytes)

    def _bytes(self, matrices: int, parameters: int) -> float:
        """Of so many parameters, of which so many are in matrices that a format may hold."""
        return matrices * self.precision.weight_bytes(self.dtype_bytes) + (parameters - matrices) * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        return self.embedding_parameters * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the language-model head, which a step with sampled rows reads whole, tied or not."""
        return self.embedding_parameters * self.dtype_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters on one device."""
        layers = self.expert_layers * self.expert_layer_bytes
        layers += (self.layers - self.expert_layers) * self.layer_bytes
        tables = 1 if self.tied_embeddings else 2
        matrices = sum(self.attention_matrices(layer) - self.attention_weights for layer in range(self.layers))
        layers += self._bytes(matrices, sum(map(self._beyond_first, range(self.layers))))
        beside = self.hidden + self.joining_parameters + self.encoder_parameters
        return layers + tables * self.embedding_bytes + beside * self.dtype_bytes

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Keys and values of one token in one layer, or the vector that both are made from; and an indexer's key."""
        return self.attended_bytes + (self.indexer.cached_bytes if self.indexer else 0)

    @property
    def attended_bytes(self) -> int:
        """Of that, what attention itself reads."""
        width = self.latent.cached if self.latent else 2 * self.kv_width
        return width * self.precision.kv_bytes(self.dtype_bytes)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return sum(map(self.kv_bytes_of, range(self.layers)))

    def kv_bytes_of(self, layer: int) -> float:
        """Keys and values of one token in a layer; compressed, its share of an entry."""
        if self.compressed:
            return self.compressed.cached(layer, self.head_dim) * self.precision.kv_bytes(self.dtype_bytes)
        return self.kv_bytes_per_token_layer

    def kv_bytes(self, tokens: int) -> int:
        """Of a sequence of so many tokens in a cache that frees what windows hide."""
        held = sum(min(tokens, window or tokens) for window in self.windows) if self.windows else self.layers * tokens
        return held * self.kv_bytes_per_token_layer

    # FLOPs: a multiply-add is two.

    @property
    def linear_flops(self) -> int:
        """FLOPs of one token in the matrices of one layer with an MLP."""
        return 2 * self.linear_weights

    @property
    def attention_flops(self) -> int:
        """FLOPs of one (query, key) pair of a prefill in one layer: a dot product and a weighted sum in every head."""
        if self.indexer:
            return self.decode_flops  # each query has keys of its own: expanding them would be for itself alone
        if self.latent:
            return 2 * self.heads * (self.latent.nope + self.latent.rope + self.latent.value)
        return 4 * self.query_width

    @property
    def decode_flops(self) -> int:
        """FLOPs of one (query, key) pair of a decode in one layer.

        Latent attention then works on the compressed vectors themselves, the expansion being absorbed into query and
        output: a dot product as wide as what is cached, a weighted sum as wide as its compressed part.
        """
        if self.latent:
            return 2 * self.heads * (self.latent.cached + self.latent.kv_rank)
        return self.attention_flops

    @property
    def expansion_flops(self) -> int:
        """FLOPs to expand the keys and values of one earlier token for a prefill in one layer; 0 unless latent and
        all are seen."""
        return 2 * self.latent.expansion_weights(self.heads) if self.latent and not self.indexer else 0

    @property
    def expanded_width(self) -> int:
        """Elements of one token's expanded keys and values in one layer; 0 unless latent and all are seen."""
        if not self.latent or self.indexer:
            return 0
        return self.heads * (self.latent.nope + self.latent.rope + self.latent.value)

    @property
    def head_flops(self) -> int:
        """FLOPs of one sampled row in the language-model head."""
        return 2 * self.embedding_parameters


def shipped() -> tuple[str, ...]:
    """Names that `ModelShape.read` knows without a path."""
    names = (file.name for file in files("playground").joinpath("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def _find(path: str | Path) -> Traversable:
    place = Path(path)
    if place.is_dir():
        return _existing(place / "config.json", path)
    if place.is_file():
        return place
    if str(path) in shipped():
        return files("playground").joinpath("models", f"{path}.json")
    raise ValueError(
        f"model.path={path}: no such folder, file or model; give a checkpoint's folder, its config.json or one of "
        + ", ".join(shipped())
    )


def _existing(file: Path, path: str | Path) -> Path:
    if file.is_file():
        return file
    raise ValueError(f"model.path={path}: the folder has no config.json; give a Hugging Face checkpoint's folder")


def _parse(content: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("not a text; give a checkpoint's folder or its config.json") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    return config
