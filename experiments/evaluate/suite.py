"""What policies are scored on: cases to search by, and others that a search never sees.

Held-out cases are later hours of the same recordings, recordings that no training case has, and other seeds. Policies
are told `max_tokens` of 1,024 and not the true output: by default a workload allows each answer just what will come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.trials import Overrides

TRAIN, HELD_OUT = "train", "held_out"
BASELINE = ("policy=vllm_v1",)
COMMON = (
    "model=llama-3.1-8b", "device=l20", "workload.max_output=1024", "workload.max_tokens=1024",
    "workload.max_prompt=8192", "workload.arrivals=poisson",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A setting and a load; `seeds` begin at `first`."""

    name: str
    overrides: Overrides
    first: int = 0

    def runs(self, policy: Sequence[str], seeds: int) -> dict[int, Overrides]:
        """Overrides of each seed's run."""
        return {
            seed: (*COMMON, *self.overrides, *policy, f"seed={seed}") for seed in range(self.first, self.first + seeds)
        }


def _case(name: str, words: str, first: int = 0) -> Case:
    return Case(name, tuple(words.split()), first)


SPLITS: Mapping[str, tuple[Case, ...]] = {
    TRAIN: (
        _case("conversation", "workload=azure_conv workload.requests=150 workload.rate=2.5 kv.blocks=2500"),
        _case("code", "workload=azure_code workload.requests=150 workload.rate=2 kv.blocks=2500"),
        _case(
            "pipeline",
            "workload=azure_conv workload.start=600 workload.requests=150 workload.rate=5 parallel=pp2 kv.blocks=3500",
        ),
        _case("plenty", "workload=azure_conv workload.start=900 workload.requests=150 workload.rate=3"),
    ),
    HELD_OUT: (
        _case(
            "later conversation",
            "workload=azure_conv workload.start=2400 workload.requests=150 workload.rate=2.5 kv.blocks=2500",
            1000,
        ),
        _case(
            "later code",
            "workload=azure_code workload.start=2400 workload.requests=150 workload.rate=2 kv.blocks=2500",
            1000,
        ),
        _case(
            "books",
            "workload=sharegpt workload.lengths.name=bwb workload.requests=100 workload.rate=0.8 kv.blocks=2500",
            1000,
        ),
        _case(
            "shared chat pipeline",
            "workload=sharegpt workload.requests=150 workload.rate=2.5 parallel=pp2 kv.blocks=3500",
            1000,
        ),
    ),
}
