"""From timed steps to the tables of a stage: as they were timed alone, or by least squares where costs mix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from playground.graphs import CHUNKS
from playground.sim.cost.fitted import Array
from playground.sim.cost.lines import robust_fit
from playground.sim.cost.profile import Decodes, Launch, Prompts, Stage
from playground.sim.cost.shape import Shape
from playground.sim.cost.straight import FLOOR
from playground.sim.cost.surface import LEAST_KEYS, Surface, in_tiles, longest, step_bucket, tiles

KNOTS = (2, 8, 16, 32, 64, 88, 152, 280, 400, 536, 784, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Tokens between which the kernels' time is taken to grow evenly; those beyond what was timed are left out."""
HEADS = (1, 16, 64, 256, 1024)
ROUNDS = 6
"""Of finding out which attention is bound by its longest path, and which steps by their launching."""
SHORT = 128
"""Mean keys up to which served decodes tell of rows, not of contexts."""
READS = 0.15
"""Share of a step's time that reading contexts takes, from which on it tells of them."""
SUPPORT, MANY = 3, 24
"""Steps about a knot; served steps of a graph's size, which are alike."""
NO_PROMPTS = Prompts([1], [0.0], 0.0, 0.0, 0.0, 0.0, 0.0, [[0.0, 0.0]], [])
PROBED = ("prompt", "history", "chunks", "mixed", "ramp")
"""Families that the costs of prompts are fitted to, beside what was served."""
FAMILIES = (*PROBED, "decode", "context", "ragged", "uneven", "random")
"""All that is no serving."""


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


class Point(NamedTuple):
    """A probe, or one step that was served, as it is without throttling."""

    source: str
    shape: Shape
    seconds: float


def stage_of(training: Sequence[Seen], slowed: Sequence[float], graph_rows: int, stage: int, tile: int) -> Stage:
    """Its tables. `slowed`: by how much each step was by heat; `tile`: tokens that products are cut into."""
    points = points_of(training, slowed, stage)
    decodes = _as_read(points, _as_served(points, _decodes(points), graph_rows), graph_rows)
    launch = _launch(points, graph_rows)
    return Stage(decodes, _prompts(points, decodes, launch, graph_rows, tile), launch)


def points_of(training: Sequence[Seen], slowed: Sequence[float], stage: int) -> list[Point]:
    """Repetitions of a probe as their median."""
    by_name: dict[tuple[str, str], list[float]] = {}
    shapes: dict[tuple[str, str], Shape] = {}
    for step, factor in zip(training, slowed, strict=True):
        key = step.source, step.name
        by_name.setdefault(key, []).append(step.seconds[stage] / factor)
        shapes[key] = step.shape
    return [Point(key[0], shapes[key], median(times)) for key, times in by_name.items()]


def _decodes(points: Sequence[Point]) -> Decodes:
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
    points: Sequence[Point], family: str, rows: Sequence[int], seconds: Sequence[float]
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


def _as_served(points: Sequence[Point], decodes: Decodes, graph_rows: int) -> Decodes:
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


def _as_read(points: Sequence[Point], decodes: Decodes, graph_rows: int) -> Decodes:
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


def _longest(points: Sequence[Point], decodes: Decodes) -> float:
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


def _launch(points: Sequence[Point], graph_rows: int) -> Launch:
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
    base, sequence = robust_fit(design, np.asarray([p.seconds for p in bound]), np.ones(len(bound)))
    return Launch(float(base), float(sequence))


def _prompts(points: Sequence[Point], decodes: Decodes, launch: Launch, graph_rows: int, tile: int) -> Prompts:
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
        found = robust_fit(design, target, weights)
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


def _weights(points: Sequence[Point]) -> Array:
    """Relative errors; of what was served each step counts less, for there are many."""
    found: Array = shares_of(points) / np.asarray([p.seconds for p in points])
    return found


def shares_of(points: Sequence[Point]) -> Array:
    """How much each counts: all that was served together no more than all probes."""
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


def _padded(used: Sequence[tuple[Point, Any]], stage: Stage, graph_rows: int) -> list[list[float]]:
    """Of each graph of decodes and prompts, what its steps take beyond all that on the median."""
    surface = Surface(stage, graph_rows)
    left: dict[tuple[int, int], list[float]] = {}
    for point, found in used:
        if found is not None:
            left.setdefault(tuple(found), []).append(point.seconds - surface.seconds(point.shape))
    return [[float(rows), float(tokens), median(more)] for (rows, tokens), more in sorted(left.items())]
