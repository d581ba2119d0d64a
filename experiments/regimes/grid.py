"""The axes of the map, and what each of their places means for a run.

Load is told against a capacity that is measured for each setting: the throughput of the reference policy when all
requests are there at once. KV pressure is told by how many requests of mean length the pool holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from experiments.settings import SettingError
from experiments.trials import Overrides

LOADS = (0.5, 0.8, 1.1)
HOLDS: Mapping[str, int | None] = {"plenty": None, "tight": 24, "scarce": 10}
"""Requests of mean length; None: as many as the device holds."""
DEPTHS = (1, 2, 4)
LONGEST = 8000
"""Tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Mean tokens of prompts and outputs; log-normal with sigma 0.8, four times the mean at most.

    No prompt is longer than a step of a policy that does not cut them may be.
    """

    prompt: int
    output: int

    @property
    def overrides(self) -> Overrides:
        most, longest = 4 * self.output, min(4 * self.prompt, LONGEST)
        return (
            "workload=poisson",
            f"workload.lengths.prompt.mean={self.prompt}",
            f"workload.lengths.output.mean={self.output}",
            f"workload.max_prompt={longest}",
            f"workload.max_output={most}",
            f"workload.max_tokens={most}",
            f"workload.max_length={longest + most}",
        )


MIXES: Mapping[str, Mix] = {"prompts": Mix(3000, 40), "both": Mix(1000, 250), "answers": Mix(200, 500)}
POLICIES: Mapping[str, Overrides] = {
    "vllm_v1": ("policy=vllm_v1",),
    "chunked 512": ("policy=chunked_prefill", "policy.budget.tokens=512"),
    "throttling": ("policy=token_throttling",),
    "vllm_v0": ("policy=vllm_v0",),
    "sglang": ("policy=sglang",),
}
REFERENCE = ("policy=vllm_v1",)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A setting without its load."""

    holds: str
    depth: int
    mix: str

    @property
    def overrides(self) -> Overrides:
        mix, holds = MIXES[self.mix], HOLDS[self.holds]
        blocks = () if holds is None else (f"kv.blocks={holds * (mix.prompt + mix.output) // BLOCK}",)
        return (*mix.overrides, *blocks, f"parallel.stages={self.depth}")


@dataclass(frozen=True, slots=True)
class Cell:
    """A place under a load."""

    place: Place
    load: float

    @property
    def name(self) -> str:
        return f"load {self.load:g}, {self.place.holds}, depth {self.place.depth}, {self.place.mix}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Which places of each axis are mapped."""

    loads: Sequence[float] = LOADS
    holds: Sequence[str] = tuple(HOLDS)
    depths: Sequence[int] = DEPTHS
    mixes: Sequence[str] = tuple(MIXES)

    def __post_init__(self) -> None:
        for name, known in (("holds", HOLDS), ("mixes", MIXES)):
            if wrong := [one for one in getattr(self, name) if one not in known]:
                raise SettingError(f"--{name} {wrong[0]}: choose of {', '.join(known)}")
        if wrong := [load for load in self.loads if not 0 < load <= 10]:
            raise SettingError(f"--loads {wrong[0]:g} must lie in (0, 10] (1 is the capacity)")
        if wrong := [depth for depth in self.depths if depth < 1]:
            raise SettingError(f"--depths {wrong[0]} must be at least 1")

    @property
    def places(self) -> list[Place]:
        return [Place(*one) for one in product(self.holds, self.depths, self.mixes)]

    def cells(self) -> Iterator[Cell]:
        for place in self.places:
            for load in self.loads:
                yield Cell(place, load)
