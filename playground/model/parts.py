"""What some families have and others have not: latent attention, experts, an encoder beside the decoder. Sizes only."""

from __future__ import annotations

from dataclasses import dataclass


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
