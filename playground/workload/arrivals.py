"""When requests arrive: gaps between them, drawn at a mean rate. Knows nothing of what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from playground.workload.errors import WorkloadError, check_positive

Floats = NDArray[np.float64]
CHUNK = 1024


class Arrivals(Protocol):
    """A process of arrivals. `rate` is requests per second; an infinite rate lets all arrive at once."""

    def gaps(self, rng: Generator, rate: float, count: int) -> Floats:
        """The next so many gaps between arrivals, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    def gaps(self, rng: Generator, rate: float, count: int) -> Floats:
        return rng.exponential(1 / rate, count)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps as vLLM's --burstiness has them: shape b, scale 1/(rate b), so that their CV is 1/sqrt(b).

    1 is Poisson, less is burstier, more is steadier. vLLM also stretches its gaps so that n requests take exactly
    n/rate seconds; here only the mean holds.
    """

    burstiness: float = 1.0

    def __post_init__(self) -> None:
        check_positive("workload.arrivals.burstiness", self.burstiness)

    def gaps(self, rng: Generator, rate: float, count: int) -> Floats:
        return rng.gamma(self.burstiness, 1 / (rate * self.burstiness), count)


@dataclass(frozen=True, slots=True)
class Constant:
    """One arrival every 1/rate seconds."""

    def gaps(self, rng: Generator, rate: float, count: int) -> Floats:
        return np.full(count, 1 / rate)


NAMED: dict[str, Arrivals] = {"constant": Constant(), "poisson": Poisson()}


def named(arrivals: Arrivals | str) -> Arrivals:
    """The process itself, or the one of that name: a word on a command line instead of an object."""
    if not isinstance(arrivals, str):
        return arrivals
    if arrivals not in NAMED:
        raise WorkloadError(
            f"workload.arrivals={arrivals} must be {' or '.join(sorted(NAMED))}, or an object by its _target_ "
            "(playground.workload.arrivals.Gamma)"
        )
    return NAMED[arrivals]


def times(arrivals: Arrivals, rng: Generator, rate: float) -> Iterator[float]:
    """Arrival times without end, in seconds; the first comes after one gap."""
    # Drawn at rate 1 and divided: equal seeds give the same pattern at every rate, so a sweep compares like with like.
    now = 0.0
    while True:
        for gap in arrivals.gaps(rng, 1.0, CHUNK).tolist():
            now += gap
            yield now / rate
