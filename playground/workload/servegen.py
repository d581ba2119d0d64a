"""ServeGen's client pools: who sends how often, how regularly and how much, drawn client by client.

Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model Serving in Production",
arXiv:2505.09999; data in `data/servegen`. Real load is the sum of few, very different clients, which one Poisson
stream does not show. Lengths of prompt and output are drawn independently (upstream draws both from one number).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from playground.workload.errors import WorkloadError
from playground.workload.files import Record, csv_records, json_records
from playground.workload.lengths import Ints
from playground.workload.rows import Row
from playground.workload.shipped import data

WINDOW = 600.0
"""Seconds for which a client's rate is given."""
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Window:
    """One client in one window: `rate` in requests per second, gaps from a Gamma or Weibull law of this shape."""

    client: int
    start: float
    rate: float
    pattern: str
    shape: float

    def arrivals(self, rng: Generator, scale: float) -> NDArray[np.float64]:
        """Arrival times in seconds, with the rate multiplied by `scale`."""
        # Rounded at random and so right on average: small clients must not vanish when the load is scaled down.
        count = int(self.rate * WINDOW * scale + rng.random())
        ends = np.cumsum(self._gaps(rng, count + 1))
        # A very small shape draws gaps that are all 0.0.
        return self.start + WINDOW * ends[:-1] / (ends[-1] or 1.0)

    def _gaps(self, rng: Generator, count: int) -> NDArray[np.float64]:
        # The scale parameter is of no effect: gaps are stretched to fill the window.
        return rng.gamma(self.shape, 1.0, count) if self.pattern == "Gamma" else rng.weibull(self.shape, count)


@dataclass(frozen=True, slots=True)
class Histogram:
    """An empirical distribution of whole numbers."""

    values: Ints
    cumulated: NDArray[np.float64]

    def draw(self, rng: Generator, count: int) -> Ints:
        # The published probabilities are rounded and do not add up to 1.
        places = np.searchsorted(self.cumulated, rng.random(count) * self.cumulated[-1], side="right")
        drawn: Ints = self.values[places]
        return drawn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompt and output lengths of one client from a time of day on."""

    start: float
    prompt: Histogram
    output: Histogram


@dataclass(frozen=True, slots=True)
class Pool:
    """All clients of one service over one day. Some clients lack sizes: see `missing`."""

    windows: tuple[Window, ...]
    sizes: Mapping[int, tuple[Sizes, ...]]

    def draw(self, rng: Generator, start: float, duration: float, rate: float | None) -> list[Row]:
        """Requests of the day's seconds [start, start + duration), in order, with `start` at time 0.

        `rate`: requests per second to scale all clients to, keeping their shares; None takes the recorded load.
        """
        windows = [w for w in self.windows if w.start < start + duration and w.start + WINDOW > start]
        if not windows:
            raise WorkloadError(f"workload.start={start}: no client is active within {duration} s")
        scale = 1.0 if rate is None else rate / _recorded_rate(windows, start, duration)
        rows = [row for window in windows for row in self._rows(window, rng, scale)]
        moved = (row._replace(arrival=(row.arrival or 0.0) - start) for row in rows)
        return sorted((r for r in moved if 0 <= (r.arrival or 0.0) < duration), key=lambda row: row.arrival or 0.0)

    def with_sizes(self) -> Pool:
        """The clients whose sizes are known."""
        return Pool(tuple(window for window in self.windows if window.client in self.sizes), self.sizes)

    def _rows(self, window: Window, rng: Generator, scale: float) -> Iterator[Row]:
        arrivals = window.arrivals(rng, scale)
        sizes = self._sizes(window, rng)
        prompts, outputs = (part.draw(rng, len(arrivals)).tolist() for part in (sizes.prompt, sizes.output))
        for arrival, prompt, output in zip(arrivals.tolist(), prompts, outputs, strict=True):
            yield Row(arrival, max(1, prompt), max(1, output), tenant=str(window.client))

    def _sizes(self, window: Window, rng: Generator) -> Sizes:
        """The client's sizes at that time of day; if it has none, those of a client drawn anew each window."""
        known = self.sizes.get(window.client)
        if known is None:
            known = list(self.sizes.values())[int(rng.integers(len(self.sizes)))]
        return known[max(0, bisect_right(known, window.start, key=lambda sizes: sizes.start) - 1)]


def read_pool(name: str) -> Pool:
    """A shipped pool: `deepseek-r1` (reasoning) or `m-large` (general)."""
    windows = tuple(_window(record) for record in csv_records(data(f"servegen/{name}_trace.csv.xz")))
    sizes: dict[int, tuple[Sizes, ...]] = {}
    for record in json_records(data(f"servegen/{name}_dataset.jsonl.xz")):
        client = record.integer("client")
        sizes[client] = (*sizes.get(client, ()), _read_sizes(record))
    return Pool(windows, sizes)


def _recorded_rate(windows: list[Window], start: float, duration: float) -> float:
    """Mean requests per second of the part of the day."""
    overlaps = (min(w.start + WINDOW, start + duration) - max(w.start, start) for w in windows)
    return sum(w.rate * overlap for w, overlap in zip(windows, overlaps, strict=True)) / duration


def _window(record: Record) -> Window:
    if (pattern := record.text("pattern")) not in ("Gamma", "Weibull"):
        raise record.error("pattern", "must be Gamma or Weibull")
    return Window(
        client=record.integer("client"),
        start=record.number("timestamp"),
        rate=record.number("rate"),
        pattern=pattern,
        shape=record.number("param1"),
    )


def _read_sizes(record: Record) -> Sizes:
    return Sizes(record.number("timestamp"), _histogram(record, "input_tokens"), _histogram(record, "output_tokens"))


def _histogram(record: Record, name: str) -> Histogram:
    values, chances = record.values[name]
    return Histogram(np.array(values, dtype=np.int64), np.cumsum(np.array(chances, dtype=np.float64)))
