"""What some families have and others have not: latent attention, experts, an encoder beside the decoder. Sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: the cache holds one compressed vector a token (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Widths in elements: of the compressed query (None: it is not), of the compressed keys and values, and of one head's
    query and key without (`nope`) and with (`rope`) rotation, and of its value.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def cached(self) -> int:
        """Elements that the cache holds of one token in one layer: 576 in DeepSeek's models."""
        return self.kv_rank + self.rope

    def query_weights(self, hidden: int, heads: int) -> int:
        """Matrix elements from the hidden state (or the compressed query) to all heads' queries."""
        return (self.query_rank or hidden) * heads * (self.nope + self.rope)

    def compression_weights(self, hidden: int) -> int:
        """Matrix elements that make the compressed vectors: no head's, so each tensor-parallel rank holds them all."""
        return hidden * ((self.query_rank or 0) + self.cached)

    def expansion_weights(self, heads: int) -> int:
        """Matrix elements from the compressed vector to all heads' keys and values."""
        return self.kv_rank * heads * (self.nope + self.value)

    def weights(self, hidden: int, heads: int) -> int:
        """Matrix elements of one layer's attention, the output projection included."""
        output = heads * self.value * hidden
        made = self.query_weights(hidden, heads) + self.compression_weights(hidden)
        return made + self.expansion_weights(heads) + output


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the keys that latent attention sees (DeepSeek-V3.2-Exp's DSA): `heads` small heads of `width` score all
    before a query, of which the best `top` are seen. They share one key, cached in 8 bits with a float32 scale."""

    heads: int
    width: int
    top: int

    @property
    def flops(self) -> int:
        """Of scoring one (query, key) pair."""
        return 2 * self.heads * self.width

    @property
    def cached_bytes(self) -> int:
        """Of one token in one layer."""
        return self.width + 4

    @property
    def vectors(self) -> int:
        """Elements of the norm of its keys, which has a bias."""
        return 2 * self.width

    def weights(self, hidden: int, query_rank: int) -> int:
        """Matrix elements that make queries, keys and the heads' weights: each tensor-parallel rank holds them all."""
        return query_rank * self.heads * self.width + hidden * (self.width + self.heads)


class Reach(NamedTuple):
    """Keys that a query of one layer looks at: all, or the last (or best) `window`; and what each of them costs."""

    window: int | None
    flops: float
    """Of one (query, key) pair, all heads together."""
    width: float
    """Cached elements read of one key."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """DeepSeek-V4's attention: one key that is its own value, seen raw in a window and compressed beyond it.

    `rates`, layer by layer: tokens in one compressed entry; 0: there are none. Where `indexed` is the rate, a small
    indexer of `index_heads` x `index_width` scores all entries, and queries look at the best `top` of them.
    Queries are compressed to `query_rank`, outputs in `groups` of heads to `output_rank` each.
    """

    query_rank: int
    groups: int
    output_rank: int
    window: int
    rates: tuple[int, ...]
    indexed: int
    index_heads: int
    index_width: int
    top: int

    def compression_weights(self, layer: int, hidden: int, width: int) -> int:
        """Matrix elements that make queries' compressed form, keys, and entries: each rank holds them all."""
        own, rate = hidden * (self.query_rank + width), self.rates[layer]
        if not rate:
            return own
        if rate != self.indexed:
            return own + 2 * hidden * width
        return own + 4 * hidden * (width + self.index_width) + hidden * self.index_heads

    def head_weights(self, layer: int, hidden: int, heads: int, width: int) -> int:
        """Matrix elements that heads have: queries, the indexer's queries, grouped and last output projection."""
        own = self.query_rank * heads * width + heads * width * self.output_rank
        index = self.query_rank * self.index_heads * self.index_width if self._indexes(layer) else 0
        return own + index + self.groups * self.output_rank * hidden

    def vectors(self, layer: int, heads: int, width: int) -> int:
        """Elements of norms, sinks and position biases."""
        own, rate = self.query_rank + width + heads, self.rates[layer]
        if not rate:
            return own
        if rate != self.indexed:
            return own + (rate + 1) * width
        return own + (2 * rate + 1) * (width + self.index_width)

    def reaches(self, layer: int, heads: int, width: int) -> list[Reach]:
        """Raw keys in the window, and of each `rate` keys before one entry."""
        found, rate, work = [Reach(self.window, 4 * heads * width, width)], self.rates[layer], 4 * heads * width
        if self._indexes(layer):
            found.append(Reach(None, 2 * self.index_heads * self.index_width / rate, self.index_width / rate))
            found.append(Reach(self.top * rate, work / rate, width / rate))
        elif rate:
            found.append(Reach(None, work / rate, width / rate))
        return found

    def cached(self, layer: int, width: int) -> float:
        """Elements held of one token, beyond the window's, which are as many for every sequence."""
        rate = self.rates[layer]
        return (width + self.index_width * self._indexes(layer)) / rate if rate else 0.0

    def _indexes(self, layer: int) -> bool:
        return self.rates[layer] == self.indexed


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP, in every layer that `dense` does not name."""

    count: int
    active: int
    """Experts that the router picks for a token."""
    intermediate: int
    """Width of one expert."""
    shared: int = 0
    """Width of the experts that every token goes through, all together."""
    shared_gate: bool = False
    """A gate before the shared experts (Qwen2-MoE): `hidden` weights."""
    bias: bool = False
    """On the router and on each expert's projections (gpt-oss)."""
    correction: bool = False
    """One number an expert that is added before it is picked (DeepSeek-V3)."""
    dense: tuple[int, ...] = ()
    """Layers that have an MLP instead."""

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ValueError(
                f"model.experts.active={self.active} must lie in 1..{self.count}, the experts that there are"
            )
        if self.intermediate < 1:
            raise ValueError(f"model.experts.intermediate={self.intermediate} must be at least 1")

    def weights(self, hidden: int) -> int:
        """Matrix elements of one expert: gate, up and down."""
        return 3 * hidden * self.intermediate

    def common_weights(self, hidden: int) -> int:
        """Matrix elements of one layer that every token meets: the router and the shared experts."""
        return hidden * (self.count + 3 * self.shared + self.shared_gate)

    def vectors(self, hidden: int) -> int:
        """Elements of one layer's biases."""
        biases = self.count * (1 + 2 * self.intermediate + hidden) if self.bias else 0
        return biases + self.correction * self.count
