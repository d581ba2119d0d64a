"""A profile's tables as functions of a step's shape: what the fit assumes and the cost model answers, in one place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from playground.graphs import CHUNKS, Bucket, bucket
from playground.sim.cost.profile import Launch, Prompts, Stage
from playground.sim.cost.shape import Shape

TILE = 64
"""Queries that attention of chunks takes at a time."""
FEW = 16
RAGGED = 2.0
"""Of `Decodes.ragged`: how much more the longest reads than the average, in units of it."""
LEAST_KEYS = 16.0
"""Read by the decodes of `Decodes.seconds`."""

Points = Sequence[Sequence[float]]


class Curve:
    """Straight lines through points, the last one going on; flat before the first."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Points) -> None:
        ordered = sorted((float(x), float(y)) for x, y in points)
        self._xs = [x for x, _ in ordered]
        self._ys = [y for _, y in ordered]

    @property
    def last(self) -> float:
        return self._xs[-1]

    def at(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        high = min(bisect_left(xs, x), len(xs) - 1)
        low = high - 1
        return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low])


@dataclass(frozen=True, slots=True)
class Reading:
    """What decodes take for reading long contexts, by rows and mean keys.

    Beyond what was timed of so many rows each key takes `rate` seconds, as it does where most were read. Kernels are
    cut otherwise from one power of two to the next: beyond `FEW` rows, no line is drawn from one side to the other.
    """

    rows: Sequence[int]
    curves: Sequence[Curve]
    rate: float

    def at(self, rows: int, keys: float) -> float:
        if not self.rows:
            return 0.0
        high = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        above = self._of(high, keys)
        if rows >= self.rows[high] or (rows > FEW and (high == 0 or _power(self.rows[high - 1]) != _power(rows))):
            return above * rows / self.rows[high]
        if high == 0:
            return above
        share = (rows - self.rows[high - 1]) / (self.rows[high] - self.rows[high - 1])
        return above * share + self._of(high - 1, keys) * (1 - share)

    def _of(self, index: int, keys: float) -> float:
        curve = self.curves[index]
        return curve.at(min(keys, curve.last)) + max(keys - curve.last, 0.0) * self.rows[index] * self.rate


def reading(rows_timed: Sequence[int], tables: Sequence[Points]) -> Reading:
    curves = [Curve(points) for points in tables]
    timed = [(points[-1][0] * rows, rows, points) for rows, points in zip(rows_timed, tables, strict=True)]
    if not timed:
        return Reading([], [], 0.0)
    _, rows, points = max(timed, key=lambda found: found[0])
    (x, before), (last, after) = points[-2:]
    return Reading(rows_timed, curves, (after - before) / (last - x) / rows)


def step_bucket(shape: Shape, graph_rows: int) -> Bucket | None:
    """What a step is padded to; None: it is launched kernel by kernel."""
    if not graph_rows:
        return None
    return bucket(shape.decodes, shape.prefill_tokens, len(shape.chunks), graph_rows)


def in_tiles(tokens: int, tile: int) -> int:
    """Tokens that kernels compute, padding included: what exceeds a tile fills the last one."""
    return tokens if tokens <= tile else -(-tokens // tile) * tile


def tiles(shape: Shape) -> float:
    """(query, key) pairs of chunks in whole tiles of queries."""
    return sum([-(-length // TILE) * TILE * (start + (length + 1) / 2) for start, length in shape.chunks])


def longest(shape: Shape) -> int:
    """Keys of the chunk that reads most."""
    return max([start + length for start, length in shape.chunks], default=0)


@dataclass(slots=True)
class Surface:
    """Seconds of one stage, alone on an unthrottled device."""

    stage: Stage
    graph_rows: int
    _rows: Curve = field(init=False, repr=False)
    _even: Reading = field(init=False, repr=False)
    _ragged: Reading = field(init=False, repr=False)
    _tokens: Curve = field(init=False, repr=False)
    _head: Curve = field(init=False, repr=False)
    _padded: dict[tuple[int, int], float] = field(init=False, repr=False)
    _factors: dict[int, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        decodes, prompts = self.stage.decodes, self.stage.prompts
        self._rows = Curve([*zip(decodes.rows, decodes.seconds, strict=True)])
        self._even = reading(decodes.context_rows, decodes.contexts)
        self._ragged = reading(decodes.ragged_rows, decodes.ragged)
        self._tokens = Curve([*zip(prompts.tokens, prompts.seconds, strict=True)])
        self._head = Curve(prompts.head)
        self._factors = {int(rows): factor for rows, factor in decodes.factors}
        self._padded = {(int(rows), int(tokens)): seconds for rows, tokens, seconds in prompts.padded}

    def seconds(self, shape: Shape) -> float:
        found = step_bucket(shape, self.graph_rows)
        if not shape.chunks:
            time = self._rows.at(shape.decodes if found is None else found.rows) + self.contexts(shape)
        else:
            time = self._with_chunks(shape, found)
        return time if found is not None or not self.graph_rows else max(time, self.launch(shape))

    def launch(self, shape: Shape) -> float:
        """Of the host, for a step that no graph takes."""
        launch: Launch = self.stage.launch
        return launch.base + launch.sequence * shape.sequences

    def contexts(self, shape: Shape) -> float:
        """Of decodes, beyond one block each."""
        if not shape.decodes:
            return 0.0
        rows, mean = shape.decodes, shape.decode_context / shape.decodes
        time = self._even.at(rows, mean)
        if self._ragged.rows and rows > 1:
            share = min((shape.decode_longest / mean - 1) / RAGGED, 1.0)
            time += share * (self._ragged.at(rows, mean) - time)
        return (time + self.stage.decodes.longest * self.beyond(shape)) * self._factor(shape)

    def beyond(self, shape: Shape) -> float:
        """Keys that the longest decode reads beyond those that the tables know of."""
        mean = shape.decode_context / shape.decodes
        return max(shape.decode_longest - mean * (1 + RAGGED if self._ragged.rows else 1), 0.0)

    def _factor(self, shape: Shape) -> float:
        if not self._factors or (found := step_bucket(shape, self.graph_rows)) is None:
            return 1.0
        if (known := self._factors.get(found.rows)) is None:
            known = self._factors[found.rows] = _nearest(self.stage.decodes.factors, found.rows)
        return known

    def _with_chunks(self, shape: Shape, found: Bucket | None) -> float:
        prompts: Prompts = self.stage.prompts
        tokens, sampled = (shape.tokens, shape.sampled) if found is None else (sum(found), found.rows + CHUNKS)
        time = self._tokens.at(in_tiles(tokens, prompts.tile)) + self._head.at(sampled) + self.contexts(shape)
        time += max(prompts.work * tiles(shape), prompts.path * longest(shape))
        time += prompts.keys * shape.prefill_context + prompts.chunk * len(shape.chunks) + prompts.row * shape.decodes
        return time if found is None else time + self._padded.get((found.rows, found.tokens), 0.0)


def _nearest(factors: Points, rows: int) -> float:
    """Of the size that is closest among those up to the same power of two; 1 where there is none."""
    same = [(abs(known - rows), factor) for known, factor in factors if _power(int(known)) == _power(rows)]
    return min(same)[1] if same else 1.0


def _power(rows: int) -> int:
    return (rows - 1).bit_length()
