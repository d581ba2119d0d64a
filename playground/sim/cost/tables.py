"""Measured tables on disk, read into what a step can look up in microseconds: values by count, and grids.

It knows numbers, axes and files; what an operator is, and how often a step runs it, is the cost models' business.
"""

from __future__ import annotations

import csv
import gzip
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class BeyondTable(ValueError):
    """A step lies outside of what was measured."""


class Bounds:
    """How far a set of tables reaches, and what happens beyond: an error, or one warning and straight lines on."""

    def __init__(self, name: str, extrapolate: bool) -> None:
        self._name = name
        self._extrapolate = extrapolate
        self._told: set[str] = set()

    def check(self, what: str, value: float, most: float) -> None:
        """`BeyondTable` if `value` exceeds `most`, unless extrapolation was asked for."""
        if value <= most:
            return
        problem = f"{what}={value:g} lies beyond the {most:g} that were measured"
        if not self._extrapolate:
            raise BeyondTable(
                f"cost.path={self._name}: {problem}: keep the workload within it (limits.max_tokens, limits.max_seqs, "
                "workload lengths), or continue the tables in straight lines with cost.extrapolate=true"
            )
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"cost.path={self._name}: {problem}: extrapolated, as asked for", stacklevel=3)


class Curve:
    """Values at every whole number from 0 to the largest measured one; straight lines between, the first one below.

    Beyond, it goes on as steeply as over its upper half: the last few points may lie on one step of a staircase.
    """

    def __init__(self, counts: Sequence[float] | Array, values: Sequence[float] | Array) -> None:
        self.most = int(max(counts))
        order = np.argsort(counts)
        known, measured = np.asarray(counts, float)[order], np.asarray(values, float)[order]
        self._values: list[float] = np.interp(np.arange(self.most + 1), known, measured).tolist()
        half = self.most // 2
        self._slope = (self._values[-1] - self._values[half]) / (self.most - half) if self.most else 0.0

    def at(self, count: int) -> float:
        if count <= self.most:
            return self._values[count]
        return self._values[-1] + self._slope * (count - self.most)

    def __add__(self, other: Curve) -> Curve:
        most = min(self.most, other.most)
        return Curve(range(most + 1), [self.at(count) + other.at(count) for count in range(most + 1)])

    def scaled(self, factor: float) -> Curve:
        return Curve(range(self.most + 1), [factor * value for value in self._values])


class Grid:
    """A full grid of any dimension, multilinear between its points.

    Below an axis' first value the first counts; beyond its last the last two are continued in a straight line.
    """

    def __init__(self, axes: Sequence[Sequence[float]], values: Array) -> None:
        """`values`: shape (len(axis) for each axis)."""
        self.axes = [list(axis) for axis in axes]
        if values.shape != tuple(map(len, self.axes)) or not np.isfinite(values).all():
            raise ValueError(f"a grid of shape {values.shape} is not whole on axes of {[len(a) for a in self.axes]}")
        self._values: list[float] = values.ravel().tolist()
        self._strides = [int(np.prod(values.shape[axis + 1 :])) for axis in range(values.ndim)]

    def at(self, *point: float) -> float:
        corners = [(0, 1.0)]
        for axis, stride, value in zip(self.axes, self._strides, point, strict=True):
            low, share = _bracket(axis, value)
            if share == 0.0:
                corners = [(offset + low * stride, weight) for offset, weight in corners]
                continue
            near = 1.0 - share
            corners = [
                corner
                for offset, weight in corners
                for corner in (
                    (offset + low * stride, weight * near),
                    (offset + (low + 1) * stride, weight * share),
                )
            ]
        values = self._values
        return sum([values[offset] * weight for offset, weight in corners])


def _bracket(axis: list[float], value: float) -> tuple[int, float]:
    """Index of the point below, and the share of the way to the next one; above 1 beyond the end."""
    if value <= axis[0] or len(axis) == 1:
        return 0, 0.0
    low = min(bisect_right(axis, value), len(axis) - 1) - 1
    return low, (value - axis[low]) / (axis[low + 1] - axis[low])


def whole_grid(points: Mapping[tuple[float, ...], float]) -> Grid:
    """The full grid among the points that reaches farthest, and of those the one with the most points.

    Profiles are unions of several sweeps, so that not every combination exists. What is left out serves to check the
    interpolation.
    """
    axes = _full_axes(frozenset(points))
    values = np.asarray([points[point] for point in product(*axes)])
    return Grid(axes, values.reshape([len(axis) for axis in axes]))


def _full_axes(points: frozenset[tuple[float, ...]]) -> list[list[float]]:
    """Axes of which every combination is among the points: one candidate for each set that some first value has."""
    rests: dict[float, set[tuple[float, ...]]] = {}
    for first, *rest in points:
        rests.setdefault(first, set()).add(tuple(rest))
    if len(next(iter(points))) == 1:
        return [sorted(rests)]
    candidates = []
    for distinct in dict.fromkeys(map(frozenset, rests.values())):
        inner = _full_axes(distinct)
        needed = set(product(*inner))
        candidates.append([sorted(first for first, rest in rests.items() if needed <= rest), *inner])
    ends = [{min(axis), max(axis)} for axis in zip(*points, strict=True)]
    return max(candidates, key=lambda axes: _merit(axes, ends))


def _merit(axes: list[list[float]], ends: list[set[float]]) -> tuple[int, int, list[list[float]]]:
    """How many ends are reached, how many points there are; the axes themselves settle what is equal."""
    reached = sum(len(end.intersection(axis)) for axis, end in zip(axes, ends, strict=True))
    return reached, int(np.prod([len(axis) for axis in axes])), axes


def find(path: str) -> Path:
    """A folder of the user's, or one of those that ship with the playground; `ValueError` names the latter."""
    if Path(path).is_dir():
        return Path(path)
    root = Path(str(files("playground.sim.cost").joinpath("data")))
    for place in sorted(root.iterdir()):
        if (place / path).is_dir():
            return place / path
    raise ValueError(f"cost.path={path}: no such folder; give one, or one of those shipped: {', '.join(shipped())}")


def shipped() -> list[str]:
    """Names of the shipped tables, as `find` takes them."""
    root = Path(str(files("playground.sim.cost").joinpath("data")))
    bundles = {str(file.parent.parent.relative_to(root / "llmservingsim")) for file in root.rglob("dense.csv.gz")}
    return sorted([*bundles, *(str(file.parent.relative_to(root / "vidur")) for file in root.rglob("attn_decode.*"))])


def existing(folder: Path, name: str) -> Path | None:
    """`name`.csv or `name`.csv.gz of a folder."""
    return next((file for end in (".csv", ".csv.gz") if (file := folder / f"{name}{end}").is_file()), None)


def required(folder: Path, name: str) -> Path:
    if file := existing(folder, name):
        return file
    raise ValueError(f"cost.path={folder}: {name}.csv (or .csv.gz) is missing; give a folder that holds the tables")


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """Of a CSV file, gzipped or not."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        yield from csv.DictReader(stream)


def numbers(file: Path) -> Array:
    """[row, column] of a CSV file that holds nothing but numbers below its header, gzipped or not."""
    try:
        return np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file}: not a table of numbers: {error}") from error


def columns(file: Path) -> list[str]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        return next(csv.reader(stream))


def by_name(file: Path) -> dict[str, tuple[list[float], list[float]]]:
    """{operator: (counts, values)} of a CSV file with the columns operator, count, value."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        lines = csv.reader(stream)
        next(lines)
        for name, count, value in lines:
            counts, values = found.setdefault(name, ([], []))
            counts.append(float(count))
            values.append(float(value))
    return found
