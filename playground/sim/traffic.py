"""What the ranks of a stage send one another in a step, in bytes, and how long that takes.

Sizes come from a model's shape, times from collectives. It knows no kernel and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from playground.model import Experts, ModelShape
from playground.sim.cluster import Cluster
from playground.sim.collectives import NONE, Exchange, Team

EXCHANGES = ("all_gather", "padded_all_gather", "all_to_all", "padded_all_to_all")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Exchanges of one step on each stage, of `layers[stage]` layers.

    Tensor parallelism sums twice a layer, and collects logits on the last stage. In lockstep (DP attention) each layer
    with experts brings the tokens of all ranks to the experts and back, by `exchange`: `all_gather` (back by
    reduce-scatter) shows every rank all tokens; `all_to_all` sends a token once to each rank that has one of its
    experts; with `padded_` every rank gathers as much as the one with most tokens, or sends each rank room for all of
    its tokens' experts.
    Layers without experts are computed where the tokens are.
    """

    model: ModelShape
    cluster: Cluster
    layers: tuple[int, ...]
    exchange: str = "all_gather"
    token_bytes: int = field(init=False)
    """Of one token's hidden state."""
    _copies: float = field(init=False)
    """Ranks other than its own that a token goes to, on average, in an all-to-all."""
    _gathering: Team = field(init=False)
    """One device of each replica: those that gather."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"parallel.exchange={self.exchange} must be one of {', '.join(EXCHANGES)}")
        keep, cluster = object.__setattr__, self.cluster
        keep(self, "token_bytes", self.model.hidden * self.model.dtype_bytes)
        ranks = cluster.ranks.ranks
        experts = self.model.experts
        keep(self, "_copies", (ranks - 1) * reach(experts, ranks) if experts else 0.0)
        replicas = cluster.replicas if cluster.lockstep else 1
        hosts = min(cluster.ranks.hosts, replicas)
        keep(self, "_gathering", Team(cluster.links, hosts, replicas // hosts))

    def collectives(self, stage: int, tokens: Sequence[int], sampled: int) -> Exchange:
        """All of a stage's in one step: `tokens` of each rank of the group, rows that the busiest one samples."""
        found, most = NONE, max(tokens)
        if self.cluster.tp > 1:
            found = self.cluster.tensor.all_reduce(most * self.token_bytes).times(2 * self.layers[stage])
            if stage == len(self.layers) - 1 and sampled:
                logits = sampled * self.model.vocabulary * self.model.dtype_bytes
                found = found.plus(self.cluster.tensor.all_gather(logits))
        if self.cluster.lockstep and (count := self.expert_layers(stage)):
            found = found.plus(self.experts(tokens).times(2 * count))
        return found

    def expert_layers(self, stage: int) -> int:
        first = sum(self.layers[:stage])
        return sum(map(self.model.has_experts, range(first, first + self.layers[stage])))

    def experts(self, tokens: Sequence[int]) -> Exchange:
        """Tokens to the experts of one layer; bringing the results back takes as long."""
        most, experts, tp = max(tokens), self.model.experts, self.cluster.tp
        assert experts is not None
        if self.exchange == "all_gather":
            return self._gathering.all_gather(sum(tokens) * self.token_bytes)
        if self.exchange == "padded_all_gather":
            return self._gathering.all_gather(len(tokens) * most * self.token_bytes)
        # Each of the devices that hold the same tokens sends its share of them.
        rows = most / tp * self._copies
        if self.exchange == "padded_all_to_all":
            rows = most / tp * experts.active * (self.cluster.ranks.ranks - 1)
        return self.cluster.ranks.all_to_all(rows * self.token_bytes)


def check_experts(model: ModelShape, ep: int, ranks: int, exchange: str = "all_gather") -> None:
    """Whether a model's experts can be dealt out over `ep` of the ranks that share them; one line that says why not."""
    if ep > 1 and model.experts is None:
        raise ValueError(f"parallel.ep={ep}: the model has no experts; set parallel.ep=1 or choose one that has")
    if model.experts and model.experts.count % ep:
        raise ValueError(f"parallel.ep={ep} must divide the model's {model.experts.count} experts")
    if ranks % ep:
        raise ValueError(
            f"parallel.ep={ep} must divide the {ranks} devices that share experts: parallel.tp, times "
            "parallel.replicas with parallel.dp_attention=true"
        )
    if model.experts and exchange.endswith("all_to_all") and ep < ranks:
        raise ValueError(
            f"parallel.exchange={exchange} needs experts of its own on every rank: set parallel.ep={ranks}, or gather"
        )


def reach(experts: Experts, ranks: int) -> float:
    """The share of tokens that have an expert on a given one of so many ranks, if all experts are as likely."""
    elsewhere = experts.count - experts.count / ranks
    return 1 - prod(max(elsewhere - pick, 0) / (experts.count - pick) for pick in range(experts.active))
