"""How long prompts and outputs are: distributions, and empirical pairs from data sets. In tokens, at least 1."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from playground.workload.errors import WorkloadError, check_at_least, check_count, check_number, check_positive
from playground.workload.shipped import find

Ints = NDArray[np.int64]


class Length(Protocol):
    """A distribution of one length."""

    def check(self, option: str) -> None:
        """Raise a `WorkloadError` if a parameter makes no sense; `option` is how the user reaches this object."""
        ...

    def draw(self, rng: Generator, count: int) -> Ints: ...


class Lengths(Protocol):
    """A joint distribution of prompt and output lengths."""

    def check(self, option: str) -> None: ...

    def draw(self, rng: Generator, count: int) -> tuple[Ints, Ints]:
        """So many prompts and as many outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    length: int

    def check(self, option: str) -> None:
        check_count(f"{option}.length", self.length)

    def draw(self, rng: Generator, count: int) -> Ints:
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers in [L(1-r), L(1+r)], ends included: vLLM's --random-range-ratio.

    SGLang's option of the same name means another interval: see `UniformBelow`.
    """

    length: int
    ratio: float = 0.0

    def check(self, option: str) -> None:
        check_count(f"{option}.length", self.length)
        if not 0 <= check_number(f"{option}.ratio", self.ratio) < 1:
            raise WorkloadError(f"{option}.ratio={self.ratio} must lie in [0, 1)")

    def draw(self, rng: Generator, count: int) -> Ints:
        low, high = int(self.length * (1 - self.ratio)), int(self.length * (1 + self.ratio))
        return rng.integers(max(1, low), high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class UniformBelow:
    """Whole numbers in [max(1, L r), L]: SGLang's --random-range-ratio."""

    length: int
    ratio: float = 0.0

    def check(self, option: str) -> None:
        check_count(f"{option}.length", self.length)
        if not 0 <= check_number(f"{option}.ratio", self.ratio) <= 1:
            raise WorkloadError(f"{option}.ratio={self.ratio} must lie in [0, 1]")

    def draw(self, rng: Generator, count: int) -> Ints:
        return rng.integers(max(1, int(self.length * self.ratio)), self.length, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with this mean; `sigma` is the standard deviation of the logarithm (real traces: 1 to 1.5)."""

    mean: float
    sigma: float = 1.0

    def check(self, option: str) -> None:
        check_at_least(f"{option}.mean", self.mean, 1)
        check_positive(f"{option}.sigma", self.sigma)

    def draw(self, rng: Generator, count: int) -> Ints:
        return _rounded(rng.lognormal(log(self.mean) - self.sigma**2 / 2, self.sigma, count))


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal, truncated: values below 1 are drawn again, so a wide one has a mean above `mean`."""

    mean: float
    stddev: float

    def check(self, option: str) -> None:
        # With the mean at 1 or more, half of all draws succeed: drawing again ends.
        check_at_least(f"{option}.mean", self.mean, 1)
        check_at_least(f"{option}.stddev", self.stddev, 0)

    def draw(self, rng: Generator, count: int) -> Ints:
        values = rng.normal(self.mean, self.stddev, count)
        while (low := values < 1).any():
            values[low] = rng.normal(self.mean, self.stddev, int(low.sum()))
        return _rounded(values)


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and output lengths that know nothing of each other."""

    prompt: Length
    output: Length

    def check(self, option: str) -> None:
        self.prompt.check(f"{option}.prompt")
        self.output.check(f"{option}.output")

    def draw(self, rng: Generator, count: int) -> tuple[Ints, Ints]:
        return self.prompt.draw(rng, count), self.output.draw(rng, count)


@dataclass(frozen=True, slots=True)
class LengthSet:
    """Pairs drawn with replacement from a data set: `sharegpt`, `arxiv`, `bwb`, any shipped trace, or a file.

    Pairs over a maximum are left out before drawing (arXiv has an odd tail of outputs over 1024 tokens).
    """

    name: str
    format: str = "lengths"
    max_prompt: int | None = None
    max_output: int | None = None

    def check(self, option: str) -> None:
        check_count(f"{option}.max_prompt", self.max_prompt)
        check_count(f"{option}.max_output", self.max_output)
        find(f"{option}.name", self.name, self.format)

    def draw(self, rng: Generator, count: int) -> tuple[Ints, Ints]:
        pairs = self.pairs()
        picked = pairs[rng.integers(len(pairs), size=count)]
        return picked[:, 0], picked[:, 1]

    def pairs(self) -> Ints:
        """All pairs that may be drawn, one (prompt, output) a row."""
        rows = find("workload.lengths.name", self.name, self.format).rows()
        pairs = np.array([(row.prompt_length, row.output_length or 1) for row in rows], dtype=np.int64)
        most = [self.max_prompt or np.inf, self.max_output or np.inf]
        if not len(kept := pairs[(pairs <= most).all(axis=1)]):
            raise WorkloadError(f"workload.lengths.name={self.name}: no pair lies within max_prompt and max_output")
        return kept


def _rounded(values: NDArray[np.float64]) -> Ints:
    return np.maximum(1, np.rint(values)).astype(np.int64)
