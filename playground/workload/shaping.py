"""What is done to the rows of a workload before they are sent: cut, limit, stretch, re-time. Row by row, lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from math import inf

from numpy.random import Generator

from playground.workload.arrivals import Arrivals, times
from playground.workload.errors import WorkloadError
from playground.workload.rows import Row

Shape = Callable[[Iterable[Row]], Iterator[Row]]


def arrival(row: Row) -> float:
    """When the row arrives, or an error that says how to give it a time."""
    if row.arrival is None:
        raise WorkloadError(
            "workload.arrivals=None: this data has no arrival times; set workload.arrivals=poisson and workload.rate "
            "(or workload=sessions for rows with delays)"
        )
    return row.arrival


def sort(rows: Iterable[Row]) -> Iterator[Row]:
    """By arrival, keeping the file's order among equals; rows without times stay as they are."""
    return iter(sorted(rows, key=lambda row: 0.0 if row.arrival is None else row.arrival))


def window(rows: Iterable[Row], start: float, duration: float | None) -> Iterator[Row]:
    """Rows that arrive in [start, start + duration), moved so that `start` is time 0. Rows must be sorted."""
    end = inf if duration is None else start + duration
    for row in rows:
        if (at := arrival(row)) >= end:
            return
        if at >= start:
            yield row._replace(arrival=at - start)


def spread(rows: Iterable[Row], slot: float) -> Iterator[Row]:
    """Rows of one time stamp set evenly into the `slot` seconds after it, but never beyond the next stamp.

    Undoes the rounding of a trace: arrivals on a 3-second grid would otherwise come in bursts that nobody saw.
    """
    groups = (list(group) for _, group in groupby(rows, key=arrival))
    for group, following in pairwise(_ended(groups)):
        at = arrival(group[0])
        width = min(slot, arrival(following[0]) - at) if following else slot
        for place, row in enumerate(group):
            yield row._replace(arrival=at + width * place / len(group))


def stretch(rows: Iterable[Row], speedup: float) -> Iterator[Row]:
    """All times divided by `speedup`."""
    return (row._replace(arrival=arrival(row) / speedup) for row in rows)


def retime(rows: Iterable[Row], arrivals: Arrivals, rng: Generator, rate: float) -> Iterator[Row]:
    """The same rows in the same order with arrivals drawn anew, as gLLM's experiments have them."""
    return (row._replace(arrival=at) for row, at in zip(rows, times(arrivals, rng, rate), strict=False))


def mean_rate(rows: Iterable[Row]) -> float:
    """Requests per second: the inverse of the mean gap; infinite if all arrive at once."""
    first, last, count = None, 0.0, 0
    for row in rows:
        last, count = arrival(row), count + 1
        first = last if first is None else first
    span = last - (first or 0.0)
    return (count - 1) / span if span > 0 else inf


def drop_long(rows: Iterable[Row], prompt: float, output: float, total: float) -> Iterator[Row]:
    """Rows within the limits, in tokens."""
    for row in rows:
        length = row.output_length or 1
        if row.prompt_length <= prompt and length <= output and row.prompt_length + length <= total:
            yield row


def drop_short(rows: Iterable[Row], prompt: int, output: int) -> Iterator[Row]:
    """Rows with at least so many tokens."""
    return (row for row in rows if row.prompt_length >= prompt and (row.output_length or output) >= output)


def clip_long(rows: Iterable[Row], prompt: float, output: float, total: float) -> Iterator[Row]:
    """All rows, cut to the limits: outputs at their end; prompts too, with prefix ids and tokens.

    Where prompt and output together are too long the output is kept and the prompt is cut.
    """
    for row in rows:
        length = int(min(row.output_length or 1, output, total - 1))
        yield _cut(row, int(min(row.prompt_length, prompt, total - length)), length)


def _cut(row: Row, prompt: int, output: int) -> Row:
    if prompt == row.prompt_length and output == (row.output_length or 1):
        return row
    return row._replace(
        prompt_length=prompt,
        output_length=output if row.output_length else None,
        hashes=row.hashes[: -(-prompt // row.hash_block)],
        prompt=row.prompt and row.prompt[:prompt],
    )


def _ended(groups: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """The groups and an empty one, so that `pairwise` shows the last one too."""
    yield from groups
    yield []
