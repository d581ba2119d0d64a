"""What all workloads have in common: limits on lengths, the seed, and how files are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np
from numpy.random import Generator

from playground.core import Request
from playground.workload import shaping
from playground.workload.errors import check_choice, check_count
from playground.workload.fields import ReadOptions
from playground.workload.rows import Row, to_requests

ARRIVALS, LENGTHS, SESSIONS = range(3)
"""Random streams of one seed: what is drawn from one does not depend on how much another gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every workload can be held to. Lengths in tokens.

    Requests shorter than `min_prompt` or `min_output` are left out. `long` says what happens to those beyond
    `max_prompt`, `max_output` or `max_length` (both together): `drop` leaves them out, `clip` cuts them. `max_tokens`
    is what each request may generate at most; without it, exactly what will come, which tells a policy the future
    (see `rows.to_request`).
    """

    min_prompt: int = 1
    min_output: int = 1
    max_prompt: int | None = None
    max_output: int | None = None
    max_length: int | None = None
    long: Literal["drop", "clip"] = "drop"
    max_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_prompt", "min_output", "max_prompt", "max_output", "max_tokens"):
            check_count(f"workload.{name}", getattr(self, name))
        check_count("workload.max_length", self.max_length, least=2)
        check_count("workload.seed", self.seed, least=0)
        check_choice("workload.long", self.long, ("drop", "clip"))

    def rng(self, seed: int, stream: int) -> Generator:
        return np.random.default_rng([seed if self.seed is None else self.seed, stream])

    def limit(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows within the limits, or cut to them."""
        cut = shaping.clip_long if self.long == "clip" else shaping.drop_long
        most = (self.max_prompt or inf, self.max_output or inf, self.max_length or inf)
        return cut(shaping.drop_short(rows, self.min_prompt, self.min_output), *most)

    def to_requests(self, rows: Iterable[Row]) -> Iterator[Request]:
        return to_requests(rows, self.max_tokens, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Limits):
    """A workload from a file of requests. The options below `format` are those of `fields.ReadOptions`."""

    format: str | None = None
    hash_block: int | None = None
    time_unit: float | None = None
    output_length: int | None = None
    characters_per_token: float = 4.0

    @property
    def options(self) -> ReadOptions:
        return ReadOptions(self.hash_block, self.time_unit, self.output_length, self.characters_per_token)
