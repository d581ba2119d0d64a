"""The Llama-shaped decoder: Llama, Mistral, Qwen2 (biased projections), Qwen3 (normed heads), and what differs from
them in a part only: experts for the MLP (`moe`), latent attention for heads with keys of their own (`mla`).

It computes one flat batch of tokens. It does not know where the tokens come from, who owns the blocks, or what is
done with the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import DecoderConfig
from engine.kv import KvPool
from engine.models.mla import LatentAttention
from engine.models.moe import Mixture, Trip
from engine.models.passing import Passing, Pending, finished, in_turns
from engine.overlap import NONE, Overlap
from engine.parts import layer_bytes
from engine.rope import frequencies
from engine.weights import ExpertWeights, LayerWeights, Weights
from kernels import reference
from kernels.batch import DeviceBatch, PagedBatch
from kernels.reference import rope_halves, rope_table
from kernels.registry import Ops, Project


@dataclass(frozen=True, slots=True)
class Inputs:
    """One forward pass over T tokens of several sequences, on the model's device."""

    tokens: Tensor
    """Ids, [T] int32 or int64."""
    positions: Tensor
    """Of each token in its sequence, [T] int64."""
    slots: Tensor
    """Where each token's KV goes: block * block_size + offset, [T] int64; -1 (with a fused `place_qkv`): nowhere."""
    rows: Tensor | None
    """Tokens whose successor is wanted, as indices into the batch, int64; None: all."""
    pages: PagedBatch | DeviceBatch
    pooled: tuple[int, ...] = ()
    """Tokens of every replica whose experts are shared with this one's, in this pass; without any all have as many."""


class Place(Protocol):
    """What happens between the projection of queries, keys and values and the attention, in every layer of a pass."""

    def __call__(self, qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
        """qkv [T, (H + 2K) * D] -> queries [T, H, D]; keys and values go to the layer's pool. May overwrite qkv."""
        ...


class Team(Protocol):
    """Ranks that each have a share of every layer's heads and widths."""

    rank: int
    size: int

    def add_sum(self, partial: Tensor, x: Tensor) -> Pending[Tensor]:
        """x + the sum of all ranks' partials, both [T, hidden]; overwrites both, and gives x."""
        ...

    def sum(self, x: Tensor) -> None:
        """Over all ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[rows, width] of every rank side by side, [rows, size * width]."""
        ...


class Exchange(Protocol):
    """Ranks that each have some of the experts, or parts of them, and send one another tokens."""

    replicas: int
    """With tokens of their own."""
    fixed: bool
    """Whether its sizes follow from numbers of tokens alone, so that it may be captured in a graph."""

    def of(self, tokens: Sequence[int], beside: bool) -> Trip:
        """For a pass of so many tokens on each replica, whose exchanges go on `beside` what is computed, or do not."""
        ...


class Neighbour(Protocol):
    """Another stage of the pipeline."""

    def receive(self, like: Tensor) -> Tensor: ...

    def send(self, x: Tensor) -> None: ...


class Mover(Protocol):
    """Brings layers to other stages, and some from there; see `Decoder.give`."""

    spare: int
    """Room for so many layers more than at first."""

    @property
    def layers(self) -> tuple[int, ...]:
        """How many each stage has now."""
        ...

    def move(self, layers: tuple[int, ...], model: Decoder, pool: KvPool, *others: Tensor) -> bool:
        """Have stages hold so many each: all of them call this between the same two passes.

        What layers keep in `others` goes along: KV elsewhere, [layers, ...] in the order of `pool.data`. Whether this
        stage gave or took any.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the model this is, and whom it speaks to: the whole, unless said otherwise."""

    first: bool = True
    last: bool = True
    stages: int = 1
    """Of the pipeline: so many steps are in flight at the same time."""
    team: Team | None = None
    exchange: Exchange | None = None
    """Where tokens travel to their experts; None: all that a token is to meet is in its own team."""
    held: Tensor | None = None
    """Where each of the model's experts is in this rank's weights (int32), -1: elsewhere; None: all, in order."""
    before: Neighbour | None = None
    after: Neighbour | None = None
    back: Neighbour | None = None
    """Of the last stage: where it sends what it samples, of the first: where that comes from."""
    mover: Mover | None = None
    """None: layers stay where they are."""
    overlap: Overlap = NONE
    """Of its exchanges with what it computes. Whose batch is halved for that says who calls it."""

    @property
    def forwards(self) -> bool:
        """Whether a sequence may go on before its token has come back to the host, as far as this part knows."""
        return self.first == self.last or self.back is not None


WHOLE = Part()


Half = Callable[[Tensor, Tensor, "Trip | None"], Passing]
"""Half of a layer, which adds f(y) to the residual x in place: (y [T, width], x [T, hidden], trip) -> x."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What follows on one layer's attention: norms, gate and residual belong to projections."""

    out: Half
    mlp: Half
    """Or experts; y is x here."""
    meets: bool
    """Whether tokens of all ranks come together in it."""


class Decoder:
    """A decoder with its weights; calling it computes logits and writes KV into the pool it is given."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops, part: Part = WHOLE) -> None:
        """`config` and `weights` are those of the part; `shape` stays as it is when layers come and go."""
        self.config = config
        self.shape = config.shape
        self.ops = ops
        self.part = part
        self._example = weights.layers[0].attention_norm
        self._embed = _embedding(weights.embedding, ops, part.team)
        self._layers = [_layer(layer, ops, config, part) for layer in weights.layers]
        self._head = _head(weights, config, ops, part.team)
        self._attention = _attention(config, weights.layers, ops)
        # Operations may have weights in a layout of their own, and then these are twice there.
        self._weights = list(weights.layers) if part.mover else []
        self._windows = list(config.windows)

    @property
    def dtype(self) -> torch.dtype:
        return self._example.dtype

    @property
    def device(self) -> torch.device:
        return self._example.device

    @property
    def layer_bytes(self) -> int:
        """Of the weights of the largest layer that may move, 0 if none may."""
        return max(map(layer_bytes, self._weights), default=0)

    def give(self, first: bool) -> tuple[LayerWeights, int | None]:
        """Its first layer or its last, which it has no longer, and that layer's window. It needs a `part.mover`."""
        place = 0 if first else -1
        self._layers.pop(place)
        self._attention.drop(place)
        return self._weights.pop(place), self._windows.pop(place)

    def take(self, layer: LayerWeights, window: int | None, first: bool) -> None:
        """Another layer, before its first one or after its last."""
        place = 0 if first else len(self._layers)
        self._layers.insert(place, _layer(layer, self.ops, self.config, self.part))
        self._attention.put(place, layer, window)
        self._weights.insert(place, layer)
        self._windows.insert(place, window)

    def __call__(self, inputs: Inputs, pool: KvPool, later: Inputs | None = None) -> Tensor:
        """Logits of the wanted rows, [rows, vocabulary], in the model's dtype; [0, vocabulary] unless `part.last`.

        `later`: see `body`.
        """
        x = None
        if (before := self.part.before) is not None:
            count = len(inputs.tokens) + (0 if later is None else len(later.tokens))
            x = before.receive(self._example.new_empty(count, self.shape.hidden))
        found = self.body(inputs, pool, x, later)
        if self.part.after is None:
            return found
        self.part.after.send(found)
        return found.new_empty(0, self.shape.vocabulary)

    def body(self, inputs: Inputs, pool: KvPool, x: Tensor | None, later: Inputs | None = None) -> Tensor:
        """From hidden states [T, hidden] (None on the first stage: it has tokens) to those of the next stage.

        Of the last stage: logits of the wanted rows. May overwrite x. `later` is another batch, computed by turns with
        this one and behind it in every layer; x and what is found are this one's, then that one's.
        """
        if later is None:
            most = max(inputs.pooled, default=len(inputs.tokens))
            return finished(self.passing(inputs, pool, x, self.part.overlap.hides_way(most)))
        edge = len(inputs.tokens)
        first, second = (None, None) if x is None else (x[:edge], x[edge:])
        return torch.cat(in_turns(self.passing(inputs, pool, first, True), self.passing(later, pool, second, True)))

    def passing(self, inputs: Inputs, pool: KvPool, x: Tensor | None, beside: bool) -> Passing:
        """The same, stopping where it exchanges with other ranks; tokens travel `beside` what is computed, or not.

        Of a team's rank it stops as often without tokens as with some, so that two passes exchange by the same turns
        on all ranks.
        """
        part, busy = self.part, len(inputs.tokens) > 0  # without tokens of its own a rank serves others'
        trip = None if part.exchange is None else _trip(part.exchange, inputs, beside)
        attend = self._attention.of(inputs.pages, inputs.positions, inputs.slots) if busy else None
        x = self._embed(inputs.tokens) if x is None else x  # [T, hidden]; every layer adds to it in place
        for index, (layer, kv) in enumerate(zip(self._layers, pool.layers, strict=True)):
            if attend is not None:
                x = yield from layer.out(attend(index, x, kv), x, trip)
            elif part.team is not None:
                yield
            if attend is not None or layer.meets:
                x = yield from layer.mlp(x, x, trip)
            elif part.team is not None:
                yield
        if not part.last:
            return x
        if not busy:
            return x.new_empty(0, self.config.shape.vocabulary)
        return self._head(x if inputs.rows is None else x.index_select(0, inputs.rows))


def _trip(exchange: Exchange, inputs: Inputs, beside: bool) -> Trip:
    return exchange.of(inputs.pooled or (len(inputs.tokens),) * exchange.replicas, beside)


def _embedding(table: Tensor | None, ops: Ops, team: Team | None) -> Callable[[Tensor], Tensor]:
    """Rows of the table by tokens; of a team's rank those that it has, and all of them once they are added up."""
    if table is None:
        return _absent
    if team is None:
        # Padding may hold ids that are no rows; on a CPU there is none, and checking costs time.
        embed = F.embedding if table.device.type == "cpu" else ops.embedding
        return lambda tokens: embed(tokens, table)

    def embedded(tokens: Tensor) -> Tensor:
        x = ops.embedding(tokens - team.rank * len(table), table)
        team.sum(x)
        return x

    return embedded


def _head(weights: Weights, config: DecoderConfig, ops: Ops, team: Team | None) -> Callable[[Tensor], Tensor]:
    """Logits of hidden states; each of a team's ranks has some columns, and gets all."""
    if weights.norm is None or weights.head is None:
        return _absent
    project = ops.norm_linear(weights.norm, config.rms_eps, weights.head, None)
    if team is None:
        return project
    return lambda x: team.gather(project(x))[:, : config.shape.vocabulary]


def _absent(_: Tensor) -> Tensor:
    raise RuntimeError("this stage of the pipeline has no such part")


def _own(add: Callable[[Tensor, Tensor], Tensor]) -> Half:
    """All of it is here."""

    def passing(y: Tensor, x: Tensor, _: Trip | None) -> Passing:
        yield from ()
        return add(y, x)

    return passing


def _summed(share: Callable[[Tensor], Tensor], team: Team) -> Half:
    """Every rank of a team has a share of what is added."""

    def passing(y: Tensor, x: Tensor, _: Trip | None) -> Passing:
        summing = team.add_sum(share(y), x)
        yield
        return summing()

    return passing


def _projected(product: Callable[[Tensor], Tensor], team: Team, overlap: Overlap) -> Half:
    """A product of which every rank of a team has a share: whole, or in chunks of rows, each summed by itself."""
    whole = _summed(product, team)

    def passing(y: Tensor, x: Tensor, trip: Trip | None) -> Passing:
        if (parts := overlap.parts(len(y))) == 1:
            return (yield from whole(y, x, trip))
        rows = zip(y.tensor_split(parts), x.tensor_split(parts), strict=True)
        summing = [team.add_sum(product(some), to) for some, to in rows]
        yield
        for one in summing:
            one()
        return x

    return passing


Attended = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, x [T, hidden], the layer's pool) -> what the layer's heads found, [T, width]; writes the tokens' KV."""


def _attention(config: DecoderConfig, layers: tuple[LayerWeights, ...], ops: Ops) -> _Heads | LatentAttention:
    if config.shape.latent is None:
        return _Heads(config, layers, ops)
    return LatentAttention(config, layers, ops)


class _HeadsLayer(NamedTuple):
    qkv: Project
    norm: Tensor | None
    window: int | None


class _Heads:
    """Attention whose keys and values are cached as they are, of all layers."""

    def __init__(self, config: DecoderConfig, layers: tuple[LayerWeights, ...], ops: Ops) -> None:
        self._ops, self._eps, self._scale = ops, config.rms_eps, config.shape.head_dim**-0.5
        self._layers: list[_HeadsLayer] = []
        for place, (layer, window) in enumerate(zip(layers, config.windows, strict=True)):
            self.put(place, layer, window)
        fused, like = ops.place_qkv is not reference.place_qkv, layers[0].attention_norm
        self._places: _Fused | _Stepwise = (_Fused if fused else _Stepwise)(config, ops, like.dtype, like.device)

    def of(self, pages: PagedBatch | DeviceBatch, positions: Tensor, slots: Tensor) -> Attended:
        attend = self._ops.attention(pages)
        place = self._places.of(positions, slots)

        def attended(index: int, x: Tensor, kv: Tensor) -> Tensor:
            layer = self._layers[index]
            queries = place(layer.qkv(x), layer.norm, kv)
            return attend(queries, kv, self._scale, layer.window)

        return attended

    def put(self, place: int, layer: LayerWeights, window: int | None) -> None:
        """A layer, which comes before the one that has been there."""
        if layer.qkv is None:
            raise ValueError("a layer has neither queries, keys and values nor latent attention")
        project = self._ops.norm_linear(layer.attention_norm, self._eps, *layer.qkv)
        self._layers.insert(place, _HeadsLayer(project, layer.qk_norm, window))

    def drop(self, place: int) -> None:
        self._layers.pop(place)


class _Fused:
    """One operation for everything between projection and attention."""

    def __init__(self, config: DecoderConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._op, self._heads, self._eps = ops.place_qkv, config.shape.heads, config.rms_eps
        turns, scale = frequencies(config.rope)
        halves = rope_halves(turns, config.shape.max_length, scale, torch.float32)
        self._cos, self._sin = (part.to(device) for part in halves)

    def of(self, positions: Tensor, slots: Tensor) -> Place:
        def place(qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
            return self._op(qkv, positions, slots, self._cos, self._sin, kv, self._heads, norm, self._eps)

        return place


class _Stepwise:
    """Norm of heads, rotation and write, one after another."""

    def __init__(self, config: DecoderConfig, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._ops, self._shape, self._eps = ops, config.shape, config.rms_eps
        turns, scale = frequencies(config.rope)
        table = rope_table(turns, self._shape.max_length, scale, dtype)
        self._cos, self._sin = (part.to(device) for part in table)

    def of(self, positions: Tensor, slots: Tensor) -> Place:
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        heads, kv_heads, head_dim = self._shape.heads, self._shape.kv_heads, self._shape.head_dim

        def place(qkv: Tensor, norm: Tensor | None, kv: Tensor) -> Tensor:
            rotated = qkv.view(len(qkv), -1, head_dim)[:, : heads + kv_heads]
            if norm is not None:
                rotated.copy_(self._ops.rms_norm(rotated, norm, self._eps))
            self._ops.rotate(rotated[..., : cos.shape[-1]], cos, sin)
            # The keys were changed in place, so they and the values are still side by side.
            self._ops.write_kv(qkv[:, heads * head_dim :], slots, kv)
            return rotated[:, :heads]

        return place


def _layer(weights: LayerWeights, ops: Ops, config: DecoderConfig, part: Part) -> _Layer:
    if part.team is None:
        out = _own(ops.add_linear(*weights.out))
    else:
        out = _projected(ops.linear(*weights.out), part.team, part.overlap)
    if weights.experts is None:
        return _Layer(out, _mlp(weights, ops, config, part), meets=False)
    return _Layer(out, _mixture(weights, weights.experts, ops, config, part), meets=part.exchange is not None)


def _mlp(weights: LayerWeights, ops: Ops, config: DecoderConfig, part: Part) -> Half:
    if weights.gate_up is None or weights.down is None:
        raise ValueError("a layer has neither an MLP nor experts")
    inner = ops.norm_gated(weights.mlp_norm, config.rms_eps, *weights.gate_up)
    if part.team is None:
        add = ops.add_linear(*weights.down)
        return _own(lambda y, x: add(inner(y), x))
    last = _projected(ops.linear(*weights.down), part.team, part.overlap)
    return lambda y, x, trip: last(inner(y), x, trip)


def _mixture(weights: LayerWeights, experts: ExpertWeights, ops: Ops, config: DecoderConfig, part: Part) -> Half:
    mixture = Mixture(experts, weights.gate_up, weights.down, ops, config.routing, part.held)
    team, exchange = part.team, part.exchange

    def normed(x: Tensor) -> Tensor:
        return ops.rms_norm(x, weights.mlp_norm, config.rms_eps)

    if exchange is not None:
        return _travelling(mixture, normed, team)
    if team is None:
        return _own(lambda y, x: mixture.add(normed(y), x))
    return _summed(lambda y: mixture.add(normed(y), torch.zeros_like(y)), team)


def _travelling(mixture: Mixture, normed: Callable[[Tensor], Tensor], team: Team | None) -> Half:
    """Tokens go to experts on other ranks and come back; a rank of a team has a share of what they bring."""

    def passing(y: Tensor, x: Tensor, trip: Trip | None) -> Passing:
        if trip is None:
            raise ValueError("trip=None: tokens have to get to their experts")
        share = yield from mixture.passing(normed(y), trip)
        if team is None:
            return x.add_(share)
        summing = team.add_sum(share, x) if len(x) else lambda: x
        yield
        return summing()

    return passing
