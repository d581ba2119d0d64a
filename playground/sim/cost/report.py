"""One error report for all cost models: predicted against measured seconds of single steps, whatever measured them.

Sources: run folders, CSV files of steps, splitwise-sim's performance model, operator profiles. It knows no scheduling:
what becomes of a workload is compared elsewhere.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from playground.sim.cost import kernels
from playground.sim.cost.bundles import MICROSECOND, read_operators
from playground.sim.cost.fitted import Error, kind
from playground.sim.cost.logged import steps
from playground.sim.cost.model import Cost, CostModel
from playground.sim.cost.profiled import Profiled
from playground.sim.cost.shape import Shape
from playground.sim.cost.tables import BeyondTable, by_name, columns, find, numbers, required, rows


class Setup(NamedTuple):
    """Names of a shipped model and device sheet, and the tensor-parallel degree."""

    model: str
    device: str
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One step that somebody timed, through all pipeline stages."""

    source: str
    region: str
    """decode, prefill or mixed, or a finer name."""
    shape: Shape
    seconds: float
    setup: Setup | None
    """None: what the command line says."""
    kernels_only: bool = False
    """Of kernels that run one after another: neither launches nor collectives are in it."""


class Compared(NamedTuple):
    measured: Measured
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured.seconds - 1


def read(place: str, split: str, tabled: Callable[[str], Profiled] | None = None) -> list[Measured]:
    """The steps of a source, told by what is in it. `ValueError` says what sources there are.

    `tabled` makes the model of kernel tables, whose steps depend on the model and device that the command line names.
    """
    path = Path(place)
    if tabled and kernels.found(path):
        return [*_tabled(tabled(place), place)]
    if (path / "steps.parquet").exists() or (path / "steps.arrows").exists():
        return [*_run(path)]
    if path.is_file():
        return [*_file(path, split)]
    try:
        folder = find(place)
        tables = required(folder, "attention").parent
    except ValueError as error:
        raise ValueError(f"{place}: {SOURCES} ({error})") from error
    return [*_profile(tables, place)]


SOURCES = (
    "no source of steps: give a run's folder, a CSV file (columns prefills, decodes, context, seconds), "
    "splitwise-sim's perf_model.csv, a profile's tpN folder (dense.csv, attention.csv, per_sequence.csv), or kernel "
    "tables of AIConfigurator (a system's folder with gemm and attention)"
)


def compare(measured: Iterable[Measured], model_of: Callable[[Setup | None], CostModel], stages: int) -> list[Compared]:
    """`model_of` makes, or looks up, the cost model of a setup."""
    return [Compared(one, _predicted(one, model_of(one.setup), stages)) for one in measured]


def _predicted(measured: Measured, model: CostModel, stages: int) -> float:
    costs = [model.stage(measured.shape, stage) for stage in range(stages)]
    return sum(map(_kernels if measured.kernels_only else _device_time, costs))


def _kernels(cost: Cost) -> float:
    return cost.kernels


def _device_time(cost: Cost) -> float:
    return cost.device_time


def lines(compared: Sequence[Compared]) -> Iterator[str]:
    """A table by source and region, and a last row for everything."""
    if not compared:
        return
    groups: dict[tuple[str, str], list[Compared]] = {}
    for one in compared:
        groups.setdefault((one.measured.source, one.measured.region), []).append(one)
    width = max(len("source"), *(len(source) for source, _ in groups))
    yield f"{'source':{width}}  {'region':12}{'steps':>8}{'MAPE':>9}{'median':>9}{'P95':>9}{'bias':>9}"
    for (source, region), group in sorted(groups.items()):
        yield f"{source:{width}}  {region:12}{_figures(group)}"
    if len(groups) > 1:
        yield f"{'all':{width}}  {'':12}{_figures(compared)}"


def _figures(compared: Sequence[Compared]) -> str:
    error = error_of(compared)
    return f"{error.steps:8,}{error.mape:9.1%}{error.median:9.1%}{error.p95:9.1%}{error.bias:+9.1%}"


def error_of(compared: Sequence[Compared]) -> Error:
    predicted = np.asarray([one.predicted for one in compared])
    return Error.of(predicted, np.asarray([one.measured.seconds for one in compared]))


def worst(compared: Sequence[Compared], count: int) -> Iterator[str]:
    """The steps that are predicted worst."""
    for one in sorted(compared, key=lambda one: -abs(one.error))[:count]:
        shape, measured = one.measured.shape, one.measured
        chunks = "+".join(f"{length} after {start}" for start, length in shape.chunks[:3])
        more = f" (+{len(shape.chunks) - 3} more)" if len(shape.chunks) > 3 else ""
        mean = shape.decode_context / shape.decodes if shape.decodes else 0
        decodes = f"{shape.decodes} decodes of {mean:.0f} keys" if shape.decodes else ""
        step = ", ".join(filter(None, (f"prefill {chunks}{more}" if chunks else "", decodes)))
        yield (
            f"{one.error:+8.1%}  predicted {one.predicted * 1e3:9.3f} ms, measured {measured.seconds * 1e3:9.3f} ms  "
            f"{step}  ({measured.source})"
        )


def write(file: Path, compared: Iterable[Compared]) -> None:
    """One row a step, seconds."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        out = csv.writer(stream)
        out.writerow(["source", "region", "tokens", "decodes", "context", "prefill_pairs", "predicted", "measured"])
        for measured, predicted in compared:
            shape = measured.shape
            own = shape.tokens, shape.decodes, shape.decode_context, shape.prefill_pairs
            out.writerow([measured.source, measured.region, *own, predicted, measured.seconds])


# --- sources


def _run(folder: Path) -> Iterator[Measured]:
    """Device seconds of a run's steps, all stages together."""
    for step in steps(folder):
        if (seconds := sum(step.seconds)) > 0:
            yield Measured(str(folder), kind(step.shape), step.shape, seconds, None)


def _file(file: Path, split: str) -> Iterator[Measured]:
    names = {*columns(file)}
    if {"prompt_size", "prompt_time", "token_time"} <= names:
        return _splitwise(file, split)
    if {"prefills", "decodes", "context", "seconds"} <= names:
        return _steps(file)
    raise ValueError(f"{file}: its columns {sorted(names)} are of no known source; {SOURCES}")


def _steps(file: Path) -> Iterator[Measured]:
    """Steps written down by hand or by a profiler: `prefills` as start:length|..., `context` as keys of all decodes."""
    for number, row in enumerate(rows(file), 2):
        try:
            shape = step_shape(_chunks(row["prefills"]), int(row["decodes"] or 0), int(row["context"] or 0))
            seconds = float(row["seconds"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: line {number}: {error}") from error
        if not (isfinite(seconds) and seconds > 0 and shape.tokens):
            raise ValueError(f"{file}: line {number}: needs tokens, and seconds above 0, not {row['seconds']}")
        setup = Setup(row["model"], row["device"], int(row.get("tp") or 1)) if row.get("model") else None
        yield Measured(row.get("source") or file.name, kind(shape), shape, seconds, setup)


def _chunks(text: str | None) -> list[tuple[int, int]]:
    pairs = [chunk.split(":") for chunk in (text or "").split("|") if chunk]
    return [(int(start), int(length)) for start, length in pairs]


def step_shape(chunks: Sequence[tuple[int, int]], decodes: int, context: int) -> Shape:
    """Of chunks as (tokens before, tokens) and decodes that read so many keys together; every sequence samples."""
    tokens = sum(length for _, length in chunks)
    pairs = sum(start * length + length * (length + 1) // 2 for start, length in chunks)
    read = sum(start + length for start, length in chunks)
    longest = -(-context // decodes) if decodes else 0
    rows = decodes + len(chunks)
    return Shape(tokens + decodes, rows, rows, decodes, context, longest, pairs, read, tuple(chunks))


SPLITWISE = {"llama2-70b": "llama-2-70b", "a100-80gb": "a100_80", "h100-80gb": "h100"}
"""Its names and ours; what is missing here (BLOOM, power caps) is left out."""


def _splitwise(file: Path, split: str) -> Iterator[Measured]:
    """Static batches of DGX machines: the prompts of a batch in one step, then its decodes, halfway through.

    Even rows (counted from 1) are `test`, odd ones `fit`; of repeats the median counts.
    """
    batches: dict[tuple[Setup, int, int, int], list[tuple[float, float]]] = {}
    for number, row in enumerate(rows(file), 1):
        if split != "all" and (split == "test") != (number % 2 == 0):
            continue
        if row["model"] in SPLITWISE and row["hardware"] in SPLITWISE:
            setup = Setup(SPLITWISE[row["model"]], SPLITWISE[row["hardware"]], int(row["tensor_parallel"]))
            batch = setup, int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            batches.setdefault(batch, []).append((float(row["prompt_time"]), float(row["token_time"])))
    for (setup, prompt, size, output), times in batches.items():
        source = f"splitwise {setup.model} {setup.device} tp{setup.tp}"
        prefill, decode = (median(column) / 1e3 for column in zip(*times, strict=True))
        yield Measured(source, "prefill", step_shape([(0, prompt)] * size, 0, 0), prefill, setup)
        yield Measured(source, "decode", step_shape([], size, size * (prompt + output // 2)), decode, setup)


def _profile(folder: Path, name: str) -> Iterator[Measured]:
    """Every attention row with the operators around it, as one step's kernels; steps beyond dense.csv are left out."""
    operators = read_operators(folder)
    layers = _layers(folder)
    most = max(by_name(required(folder, "dense"))["embedding"][0])
    for chunk, history, decodes, context, time in numbers(required(folder, "attention")).tolist():
        chunks = [(int(history), int(chunk))] if chunk else []
        shape = step_shape(chunks, int(decodes), int(decodes * context))
        if not shape.tokens or shape.tokens > most or shape.sampled > operators.head.most:
            continue
        layer = operators.with_mlp(shape.tokens) or operators.with_experts(shape.tokens, shape.tokens)
        kernels = layers * (layer + time * MICROSECOND) + operators.first.at(shape.tokens)
        kernels += operators.last.at(shape.tokens) + operators.head.at(shape.sampled)
        yield Measured(name, kind(shape), shape, kernels, None, kernels_only=True)


def _tabled(model: Profiled, name: str) -> Iterator[Measured]:
    """Every batch of decodes, and of prompts, whose attention is in the tables, with the operators around it."""
    attention = next(iter(model.measured.attention.values()))
    assert isinstance(attention, kernels.KernelAttention)  # `found` has told
    shapes = [step_shape([], int(rows), int(rows * context)) for rows, context in attention.decodes]
    shapes += [step_shape([(0, int(length))] * int(rows), 0, 0) for rows, length in attention.prompts if length > 1]
    for shape in shapes:
        try:
            seconds = model.stage(shape, 0).kernels
        except BeyondTable:
            continue
        yield Measured(name, kind(shape), shape, seconds, None, kernels_only=True)


def _layers(folder: Path) -> int:
    if not (file := folder.parent / "bundle.json").is_file():
        raise ValueError(f'{folder.parent}: bundle.json is missing; write {{"model": {{"layers": N}}}} into it')
    return int(json.loads(file.read_text(encoding="utf-8"))["model"]["layers"])
