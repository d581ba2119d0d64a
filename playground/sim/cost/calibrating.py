"""From timed steps to a profile: tables where steps were timed alone, least squares where they only come together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, product
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from playground.graphs import CHUNKS
from playground.sim.cost.fitted import Array, kind
from playground.sim.cost.fitting import BLOCK, nnls
from playground.sim.cost.judging import Pairs, judged
from playground.sim.cost.profile import MEASURED, Decodes, HeldOut, Launch, Line, Prompts, Stage, Straight, Throttle
from playground.sim.cost.shape import Shape
from playground.sim.cost.straight import FLOOR, StraightSurface, straight_of, straight_surfaces
from playground.sim.cost.surface import LEAST_KEYS, Surface, in_tiles, longest, step_bucket, tiles
from playground.sim.cost.throttle import Heat

KNOTS = (2, 8, 16, 32, 64, 88, 152, 280, 400, 536, 784, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Tokens between which the kernels' time is taken to grow evenly; those beyond what was timed are left out."""
TILES = (1, 64, 128)
"""Tokens that products may be cut into, as tried."""
HEADS = (1, 16, 64, 256, 1024)
ROUNDS = 6
"""Of finding out which attention is bound by its longest path, and which steps by their launching."""
SECONDS, ONSETS, SLOPES = (0.1, 0.2, 0.4, 1.0, 3.0), (0.0, 0.25, 0.5), (0.08, 0.12, 0.16, 0.2, 0.3, 0.45)
"""Of throttling, as tried."""
LIKELY = 4
"""Pairs of seconds and onset that are looked at in earnest."""
EXPLAINS = 0.95
"""Of the error without it."""
PRODUCTS = 0.4
"""Share of a step's time that products take, from which on it tells of clocks."""
SHORT = 128
"""Mean keys up to which served decodes tell of rows, not of contexts."""
READS = 0.15
"""Share of a step's time that reading contexts takes, from which on it tells of them."""
SUPPORT, MANY = 3, 24
"""Steps about a knot; served steps of a graph's size, which are alike."""
DRAWS = 200
T = TypeVar("T")
NO_PROMPTS = Prompts([1], [0.0], 0.0, 0.0, 0.0, 0.0, 0.0, [[0.0, 0.0]], [])


class Lacking(ValueError):
    """What was timed cannot tell what a profile must hold. One line: what lacks, and what to do."""


class Seen(NamedTuple):
    """One step as it was timed."""

    source: str
    """A probe's family, or what was served."""
    name: str
    """Of its probe: repetitions share it."""
    at: float
    """When it began, in seconds on one clock for all that has a `session` in common."""
    shape: Shape
    seconds: tuple[float, ...]
    """On each stage."""
    products: tuple[float, ...]
    """On each stage, seconds that products alone would take by the sheet."""
    session: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What steps on the device take, and how far that is off."""

    stages: list[Stage]
    throttle: Throttle
    held_out: dict[str, HeldOut]
    fitted: Straight


PROBED = ("prompt", "history", "chunks", "mixed", "ramp")
"""Families that the costs of prompts are fitted to, beside what was served."""
FAMILIES = (*PROBED, "decode", "context", "ragged", "uneven", "random")
"""All that is no serving."""


def fit(seen: Sequence[Seen], graph_rows: int, held_out: Callable[[Seen], bool]) -> Found:
    """Tables of every stage, the throttling that explains most, and the few coefficients that say nearly the same.

    `Lacking` if steps are.
    """
    _check(seen)
    timed = _Timed(seen, [not held_out(step) for step in seen])
    tile = _tile(timed, graph_rows)
    throttle = _throttle(timed, graph_rows, tile)
    stages = _stages(timed, graph_rows, throttle, tile)
    slowed = [factors(seen, throttle, stage) for stage in range(len(stages))]
    straight = _straight(timed.training, [timed.of_training(factor) for factor in slowed], stages, graph_rows)
    test = [(step, factor) for step, factor in zip(seen, zip(*slowed, strict=True), strict=True) if held_out(step)]
    straight = replace(straight, held_out=errors(test, straight_surfaces(straight, stages, graph_rows)))
    surfaces = [Surface(stage, graph_rows) for stage in stages]
    return Found(stages, throttle, errors(test, surfaces), straight)


def _check(seen: Sequence[Seen]) -> None:
    for family in ("decode", "context", "prompt"):
        if not any(step.source == family for step in seen):
            raise Lacking(f"no step of the family {family} was timed: calibrate with larger limits or kv.blocks")


class _Timed:
    """All that was seen, for its heat, and which of it is fitted to."""

    def __init__(self, seen: Sequence[Seen], fitted_to: Sequence[bool]) -> None:
        self._seen = seen
        self._fitted_to = fitted_to
        self.training = self.of_training(seen)

    def of_training(self, values: Sequence[T]) -> list[T]:
        """Of one for each step that was seen, those of steps that are fitted to."""
        return [*compress(values, self._fitted_to)]

    def slowed(self, throttle: Throttle, stage: int) -> list[float]:
        """By how much each step that is fitted to was slowed down, by all before it."""
        return self.of_training(factors(self._seen, throttle, stage))


def _tile(timed: _Timed, graph_rows: int) -> int:
    """None (1) unless one explains some of the error of the first stage."""
    best, least = 1, EXPLAINS * _misfit(timed, graph_rows, Throttle(), 1)
    for tile in TILES[1:]:
        if (error := _misfit(timed, graph_rows, Throttle(), tile)) < least:
            best, least = tile, error
    return best


# --- throttling


def factors(seen: Sequence[Seen], throttle: Throttle, stage: int) -> list[float]:
    """By how much each step was slowed down. Steps of a session must be in order of time."""
    heats: dict[int, Heat] = {}
    return [_factor(step, heats.setdefault(step.session, Heat(throttle)), stage) for step in seen]


def _factor(step: Seen, heat: Heat, stage: int) -> float:
    """Shares are of the time without slowing down, as whoever predicts knows it: found by going to and fro."""
    if not step.shape.chunks:
        return 1.0
    factor = 1.0
    for _ in range(3):
        share = min(step.products[stage] * factor / step.seconds[stage], 1.0)
        factor = heat.factor(step.at, share)
    heat.spent(step.at, step.seconds[stage], share)
    return factor


def _throttle(timed: _Timed, graph_rows: int, tile: int) -> Throttle:
    """Of the first stage. None unless it explains some of the error: most devices never get there."""
    cold = Surface(_stage(timed.training, [1.0] * len(timed.training), graph_rows, 0, tile), graph_rows)
    best, least = Throttle(), EXPLAINS * _misfit(timed, graph_rows, Throttle(), tile)
    for (seconds, onset), slope in product(_likely(timed, cold), SLOPES):
        throttle = Throttle(seconds, onset, slope)
        if (error := _misfit(timed, graph_rows, throttle, tile)) < least:
            best, least = throttle, error
    return best


def _likely(timed: _Timed, cold: Surface) -> list[tuple[float, float]]:
    """(seconds, onset) by which the steps that the tables say wrong were the warmer the longer they took, the best few.

    Tables are fitted anew for every throttling that is tried, which takes long; this is one look at what they leave.
    """
    heavy = [*map(_heavy, timed.training)]
    left = np.asarray([step.seconds[0] / cold.seconds(step.shape) for step in compress(timed.training, heavy)])
    if len(left) < SUPPORT:
        return []
    found = []
    for seconds, onset in product(SECONDS, ONSETS):
        warm = np.asarray(timed.slowed(Throttle(seconds, onset, min(SLOPES)), 0))[heavy]
        design = np.column_stack([np.ones(len(left)), warm])
        base, slope = np.linalg.lstsq(design, left, rcond=None)[0]
        if slope > 0:
            found.append((float(np.abs(left - base - slope * warm).mean()), seconds, onset))
    before = float(np.abs(left - left.mean()).mean())
    return [(seconds, onset) for error, seconds, onset in sorted(found)[:LIKELY] if error < before]


def _heavy(step: Seen) -> bool:
    """Whether it multiplies most of the time, on the first stage."""
    return bool(step.shape.chunks) and step.products[0] > PRODUCTS * step.seconds[0]


def _misfit(timed: _Timed, graph_rows: int, throttle: Throttle, tile: int) -> float:
    """Mean of |predicted / measured - 1|, outliers cut, of steps that multiply most of the time; on the first stage,
    each sample by itself."""
    slowed = timed.slowed(throttle, 0)
    surface = Surface(_stage(timed.training, slowed, graph_rows, 0, tile), graph_rows)
    off = [
        abs(surface.seconds(step.shape) * factor / step.seconds[0] - 1)
        for step, factor in zip(timed.training, slowed, strict=True)
        if _heavy(step)
    ]
    return float(np.mean(np.minimum(off, 0.3))) if off else 0.0


# --- tables


def _stages(timed: _Timed, graph_rows: int, throttle: Throttle, tile: int) -> list[Stage]:
    stages = range(len(timed.training[0].seconds))
    return [_stage(timed.training, timed.slowed(throttle, n), graph_rows, n, tile) for n in stages]


class _Point(NamedTuple):
    """A probe, or one step that was served, as it is without throttling."""

    source: str
    shape: Shape
    seconds: float


def _stage(training: Sequence[Seen], slowed: Sequence[float], graph_rows: int, stage: int, tile: int) -> Stage:
    points = _points(training, slowed, stage)
    decodes = _as_read(points, _as_served(points, _decodes(points), graph_rows), graph_rows)
    launch = _launch(points, graph_rows)
    return Stage(decodes, _prompts(points, decodes, launch, graph_rows, tile), launch)


def _points(training: Sequence[Seen], slowed: Sequence[float], stage: int) -> list[_Point]:
    """Repetitions of a probe as their median."""
    by_name: dict[tuple[str, str], list[float]] = {}
    shapes: dict[tuple[str, str], Shape] = {}
    for step, factor in zip(training, slowed, strict=True):
        key = step.source, step.name
        by_name.setdefault(key, []).append(step.seconds[stage] / factor)
        shapes[key] = step.shape
    return [_Point(key[0], shapes[key], median(times)) for key, times in by_name.items()]


def _decodes(points: Sequence[_Point]) -> Decodes:
    alone = sorted((p.shape.decodes, p.seconds) for p in points if p.source == "decode")
    rows, seconds = [row for row, _ in alone], [time for _, time in alone]
    found = Decodes(
        rows,
        seconds,
        *_readings(points, "context", rows, seconds),
        0.0,
        [],
        *_readings(points, "ragged", rows, seconds),
    )
    return replace(found, longest=_longest(points, found))


def _readings(
    points: Sequence[_Point], family: str, rows: Sequence[int], seconds: Sequence[float]
) -> tuple[list[int], list[list[list[float]]]]:
    """Rows, and for each what the decodes of a family take beyond those that read next to nothing."""
    table: dict[int, list[list[float]]] = {}
    for point in points:
        if point.source == family:
            count = point.shape.decodes
            more = max(point.seconds - float(np.interp(count, rows, seconds)), 0.0)
            table.setdefault(count, [[LEAST_KEYS, 0.0]]).append([point.shape.decode_context / count, more])
    counts = sorted(table)
    return counts, [_rising(table[count]) for count in counts]


def _as_served(points: Sequence[_Point], decodes: Decodes, graph_rows: int) -> Decodes:
    """Longer or shorter by what served steps of so many rows and short contexts are: their tokens, and so the experts
    that these meet, are not those of probes."""
    surface = Surface(Stage(decodes, NO_PROMPTS, Launch()), graph_rows)
    ratios: dict[int, list[float]] = {}
    for point in points:
        shape = point.shape
        if point.source in FAMILIES or shape.chunks:
            continue
        if shape.decode_context <= SHORT * shape.decodes:
            found = step_bucket(shape, graph_rows)
            rows = shape.decodes if found is None else found.rows
            ratios.setdefault(rows, []).append(point.seconds / surface.seconds(shape))
    known = [(rows, median(found)) for rows, found in sorted(ratios.items()) if len(found) >= SUPPORT]
    if not known:
        return decodes
    sizes, ratios_of = zip(*known, strict=True)
    factors = np.interp(decodes.rows, sizes, ratios_of).tolist()
    return replace(decodes, seconds=[time * factor for time, factor in zip(decodes.seconds, factors, strict=True)])


def _as_read(points: Sequence[_Point], decodes: Decodes, graph_rows: int) -> Decodes:
    """Contexts of served decodes by the graph that they ran in: kernels may be cut otherwise in the next size."""
    surface = Surface(Stage(decodes, NO_PROMPTS, Launch()), graph_rows)
    ratios: dict[int, list[float]] = {}
    for point in points:
        shape = point.shape
        if shape.chunks or point.source in FAMILIES:
            continue
        reading, found = surface.contexts(shape), step_bucket(shape, graph_rows)
        if found is not None and reading > READS * point.seconds:
            ratios.setdefault(found.rows, []).append((point.seconds - surface.seconds(shape) + reading) / reading)
    factors = [[float(rows), median(found)] for rows, found in sorted(ratios.items()) if len(found) >= MANY]
    return replace(decodes, factors=factors)


def _rising(points: Iterable[list[float]]) -> list[list[float]]:
    """More keys never take less: what noise says otherwise is levelled."""
    ordered = sorted(points)
    highest = np.maximum.accumulate([seconds for _, seconds in ordered]).tolist()
    return [[keys, seconds] for (keys, _), seconds in zip(ordered, highest, strict=True)]


def _longest(points: Sequence[_Point], decodes: Decodes) -> float:
    """Least squares over batches with one long context."""
    surface = Surface(Stage(decodes, NO_PROMPTS, Launch()), 0)
    beyond, more = [], []
    for point in points:
        if point.source == "uneven" and surface.beyond(point.shape) > 0:
            beyond.append(surface.beyond(point.shape))
            more.append(point.seconds - surface.seconds(point.shape))
    if not beyond:
        return 0.0
    return max(float(np.dot(beyond, more) / np.dot(beyond, beyond)), 0.0)


def _launch(points: Sequence[_Point], graph_rows: int) -> Launch:
    """The floor of steps that no graph takes: what tiny ones take; of those served where there are any so short."""
    if not graph_rows:
        return Launch()
    eager = [p for p in points if step_bucket(p.shape, graph_rows) is None and p.shape.chunks]
    tiny = [p.seconds for p in eager if p.source == "chunks" and p.shape.tokens <= 256]
    if not tiny:
        return Launch()
    floor = median(tiny)
    bound = [p for p in eager if p.source not in (*PROBED, "random") and p.seconds < FLOOR * floor]
    if len(bound) < 16:
        return Launch(floor)
    design = np.asarray([(1.0, p.shape.sequences) for p in bound])
    base, sequence = _robust(design, np.asarray([p.seconds for p in bound]), np.ones(len(bound)))
    return Launch(float(base), float(sequence))


def _prompts(points: Sequence[_Point], decodes: Decodes, launch: Launch, graph_rows: int, tile: int) -> Prompts:
    """Not negative least squares of relative errors, over all steps with chunks that their kernels bound."""
    bare = Stage(decodes, NO_PROMPTS, launch)
    surface = Surface(bare, graph_rows)
    wanted = [p for p in points if p.shape.chunks and p.source != "random"]
    buckets = [step_bucket(p.shape, graph_rows) for p in wanted]
    bound = [
        bucket is not None or not graph_rows or p.seconds > FLOOR * surface.launch(p.shape)
        for p, bucket in zip(wanted, buckets, strict=True)
    ]
    used = [(p, bucket) for p, bucket, keep in zip(wanted, buckets, bound, strict=True) if keep]
    if not used:
        raise Lacking("no step with prompts takes longer than launching it: raise limits.max_tokens")
    sizes = [(p.shape.tokens, p.shape.sampled) if b is None else (sum(b), b.rows + CHUNKS) for p, b in used]
    sizes = [(in_tiles(size, tile), sampled) for size, sampled in sizes]
    launched = [in_tiles(p.shape.tokens, tile) for p, keep in zip(wanted, bound, strict=True) if not keep]
    knots = dict.fromkeys(in_tiles(knot, tile) for knot in KNOTS)
    tokens = _knots([*knots], [size for size, _ in sizes], launched)
    heads = _knots(HEADS, [max(sampled, 1) for _, sampled in sizes])
    fixed = np.asarray(
        [
            [
                *_hats(size, tokens),
                *_hats(sampled, heads, 0.0),
                p.shape.prefill_context,
                len(p.shape.chunks),
                p.shape.decodes,
            ]
            for (p, _), (size, sampled) in zip(used, sizes, strict=True)
        ]
    )
    target = np.asarray([p.seconds - surface.contexts(p.shape) for p, _ in used])
    weights = _weights([p for p, _ in used])
    work = np.asarray([tiles(p.shape) for p, _ in used])
    path = np.asarray([float(longest(p.shape)) for p, _ in used])
    by_path = np.zeros(len(used), bool)
    for _ in range(ROUNDS):
        design = np.column_stack([fixed, np.where(by_path, 0.0, work), np.where(by_path, path, 0.0)])
        found = _robust(design, target, weights)
        a, b = found[-2:]
        changed = (b or _steepest(target, fixed @ found[:-2], path)) * path > a * work
        if (changed == by_path).all():
            break
        by_path = changed
    seconds, head = found[: len(tokens)], found[len(tokens) : len(tokens) + len(heads)]
    keys, chunk, row = found[len(tokens) + len(heads) : -2]
    plain = Prompts(
        [*tokens],
        seconds.tolist(),
        float(a),
        float(b),
        float(keys),
        float(chunk),
        float(row),
        [[0.0, 0.0], *[[float(n), float(s)] for n, s in zip(heads, head, strict=True)]],
        [],
        tile,
    )
    return replace(plain, padded=_padded(used, replace(bare, prompts=plain), graph_rows))


def _steepest(target: Array, rest: Array, path: Array) -> float:
    """A first guess of seconds a key on the longest path: what short chunks with long histories leave unexplained."""
    left = (target - rest) / np.maximum(path, 1.0)
    return float(np.percentile(left, 90))


def _weights(points: Sequence[_Point]) -> Array:
    """Relative errors; of what was served each step counts less, for there are many."""
    found: Array = _shares(points) / np.asarray([p.seconds for p in points])
    return found


def _shares(points: Sequence[_Point]) -> Array:
    served = sum(p.source not in FAMILIES for p in points)
    probed = len(points) - served
    share = min(1.0, (probed / served) ** 0.5) if served and probed else 1.0
    return np.asarray([1.0 if p.source in FAMILIES else share for p in points])


def _knots(knots: Sequence[int], values: Sequence[int], hidden: Sequence[int] = ()) -> list[int]:
    """Those with values enough about them, more than are `hidden`; the ends are the least and the largest value."""
    low, high = min(values), max(values)
    inside = [knot for knot in knots if low < knot < high]
    chosen = [low]
    for knot, following in zip(inside, [*inside, high][1:], strict=True):
        least, most = (chosen[-1] + knot) / 2, (knot + following) / 2
        count, unknown = (sum(least <= value <= most for value in found) for found in (values, hidden))
        if count >= max(SUPPORT, unknown + 1):
            chosen.append(knot)
    return [*chosen, high] if high > low else chosen


def _hats(value: float, knots: Sequence[int], before: float | None = None) -> Array:
    """Weights of the knots about a value; `before`: where the first one's falls to nothing, if anywhere."""
    weights = np.zeros(len(knots))
    high = min(bisect_left(knots, value), len(knots) - 1)
    if value <= knots[0]:
        weights[0] = 1.0 if before is None else max(value - before, 0.0) / (knots[0] - before)
    elif high == 0:
        weights[0] = 1.0
    else:
        share = min((value - knots[high - 1]) / (knots[high] - knots[high - 1]), 1.0)
        weights[high - 1], weights[high] = 1 - share, share
    return weights


def _padded(used: Sequence[tuple[_Point, Any]], stage: Stage, graph_rows: int) -> list[list[float]]:
    """Of each graph of decodes and prompts, what its steps take beyond all that on the median."""
    surface = Surface(stage, graph_rows)
    left: dict[tuple[int, int], list[float]] = {}
    for point, found in used:
        if found is not None:
            left.setdefault(tuple(found), []).append(point.seconds - surface.seconds(point.shape))
    return [[float(rows), float(tokens), median(more)] for (rows, tokens), more in sorted(left.items())]


# --- how good it is


def errors(
    test: Sequence[tuple[Seen, Sequence[float]]], surfaces: Sequence[Surface | StraightSurface]
) -> dict[str, HeldOut]:
    """Of all stages together, by source and kind of step. `test`: steps, and by how much each was slowed on each."""
    groups: dict[str, Pairs] = {}
    for number, (step, factor) in enumerate(test):
        predicted = sum(s.seconds(step.shape) * f for s, f in zip(surfaces, factor, strict=True))
        # Repetitions of a probe are alike, and so are neighbours in a run.
        part = step.name if step.source in FAMILIES else number // BLOCK
        for name in (step.source, f"{step.source}, {kind(step.shape)}"):
            groups.setdefault(name, Pairs()).add(predicted, sum(step.seconds), part)
    return judged(groups)


# --- straight lines


def _straight(
    training: Sequence[Seen], slowed: Sequence[Sequence[float]], stages: Sequence[Stage], graph_rows: int
) -> Straight:
    """Of the same steps as the tables; not yet judged."""
    by_stage = [_points(training, factor, stage) for stage, factor in enumerate(slowed)]
    seconds = [np.asarray([point.seconds for point in points]) for points in by_stage]
    shapes = [point.shape for point in by_stage[0]]
    return straight_of(shapes, seconds, _shares(by_stage[0]), stages, graph_rows, MEASURED)


# --- lines


def line(
    units: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    relative: bool = False,
    robust: bool = True,
    seed: int = 0,
) -> Line:
    """`base` and so much a unit, by least squares that are not negative, with bootstrap intervals.

    `robust`: outliers, what the machine held up by chance, count less. Without it the sum is kept.
    """
    target = np.asarray(seconds, float)
    design = np.column_stack([np.ones(len(target)), *[np.asarray(values, float) for values in units.values()]])
    names = ["base", *units]
    if not len(target):
        return Line(dict.fromkeys(names, 0.0))
    weights = 1 / np.maximum(target, 1e-9) if relative else np.ones(len(target))
    rounds = ROUNDS if robust else 0
    best = _robust(design, target, weights, rounds)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(target), (DRAWS, len(target)))
    drawn = [_robust(design[pick], target[pick], weights[pick], min(rounds, 2)) for pick in picks]
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return Line(*[dict(zip(names, map(float, values), strict=True)) for values in (best, low, high)])


def _robust(design: Array, target: Array, weights: Array, rounds: int = ROUNDS) -> Array:

    found = nnls(design * weights[:, None], target * weights)
    for _ in range(rounds):
        off = np.abs(design @ found - target) * weights
        limit = max(1.345 * float(np.median(off)) / 0.6745, 1e-15)
        extra = np.sqrt(np.minimum(limit / np.maximum(off, limit), 1.0)) * weights
        found = nnls(design * extra[:, None], target * extra)
    return found
