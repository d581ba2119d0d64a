"""The simulated twin of a run on hardware: the same configuration on a simulator, free-running. Besides, every decision
is replayed and every step predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from experiments import provenance, run
from experiments.build import Plan, Simulated, make, plan_of
from experiments.composing import composed
from experiments.fidelity.hardware import POINT
from experiments.parity import prove
from experiments.progress import Meter
from experiments.settings import SettingError, Settings, read
from playground.check.parity import Divergence
from playground.core import Slice
from playground.sim.cost import Calibrated, CostModel, Shape
from playground.sim.cost.fitted import kind
from playground.sim.cost.throttle import Heats
from playground.sim.durations import Throttled
from playground.trace import read as table

VERSION = 1
PAIR = "pair.json"
NOTHING_TO_DO = 2e-3
"""Seconds from the end of a step to the next decision, beyond which the host had nothing to do."""

PREDICTED = pa.schema(
    {
        "step": pa.int64(),
        "lane": pa.string(),
        "stage": pa.int32(),
        "kind": pa.string(),  # decode, prefill or mixed
        "tokens": pa.int64(),
        "sequences": pa.int64(),
        "measured": pa.float64(),  # seconds on the stage
        "predicted": pa.float64(),
        "gap_measured": pa.float64(),  # host seconds from the step before to this one; null where others ran
        "gap_predicted": pa.float64(),
    }
)


def pair(hardware: Path, study: Path, more: Sequence[str] = ()) -> Path:
    """Make a pair of a run's folder, unless it is there; the pair's folder. `more`: overrides of the simulated run."""
    labels = _labels(hardware)
    folder = study / "pairs" / str(labels["name"])
    if (folder / PAIR).is_file():  # written last
        return folder
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _link(hardware, folder / "hardware")
    described = json.loads((hardware / "run.json").read_text(encoding="utf-8"))
    config = _twin(hardware, described["spec"], more)
    cost = _cost(config)
    _predict(hardware, cost, folder / "predicted.parquet")
    parity = _parity(hardware)
    config.run_dir = str(folder / "simulated")
    run.execute(config, f"simulating {labels['name']}", _silent)
    facts = {name: described.get(name) for name in ("device", "started_at", "host", "versions", "revision", "model")}
    told = {"version": VERSION, **labels, "hardware": facts, "cost": _told(cost), "parity": parity}
    told["fitted_to"] = cost.profile.facts.get("runs", []) if isinstance(cost, Calibrated) else []
    provenance.write(folder / PAIR, told)
    return folder


def _labels(hardware: Path) -> dict[str, Any]:
    """As its plan says; of any other run, its folder's name and the whole policy."""
    file = hardware / POINT
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    if not (hardware / "summary.json").is_file():
        raise SettingError(f"{hardware}: no finished run: it has no summary.json")
    name = hardware.resolve().name
    return {"name": name, "group": name, "policy": name, "workload": "-", "load": "-", "pool": "-", "repeat": 0}


def _link(hardware: Path, place: Path) -> None:
    place.symlink_to(hardware.resolve(), target_is_directory=True)


def _twin(hardware: Path, spec: Mapping[str, Any], more: Sequence[str]) -> DictConfig:
    """The run's own configuration with a simulated backend, and the pool that the engine found room for."""
    config = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.load(hardware / "config.yaml"))
    assert isinstance(config, DictConfig)
    room = ["+backend.utilization=1.0", "+backend.reserve_bytes=0.0"]
    chosen = composed(["backend=sim", "backend/cost=calibrated", *room, *more])
    config.backend = chosen.backend
    for override in more:
        name = override.partition("=")[0].lstrip("+").partition(".")[0].partition("/")[0]
        if name != "backend":
            config[name] = chosen[name]
    config.kv.blocks, config.kv.block_size = spec["blocks"], spec["block_size"]
    config.limits.max_seqs, config.limits.max_tokens = spec["max_seqs"], spec["max_tokens"]
    config.plots = False
    return config


def _cost(config: DictConfig) -> CostModel:
    wanted = read(config)
    backend: Simulated = make("backend", wanted.backend, Simulated)
    plan: Plan = plan_of(wanted)
    return backend.cost_model(plan)


def _told(cost: CostModel) -> dict[str, Any]:
    return {"model": type(cost).__name__, "file": getattr(cost, "file", None)}


def _parity(hardware: Path) -> dict[str, Any]:
    try:
        report = prove(hardware)
    except Divergence as divergence:
        return {"identical": False, "steps": 0, "text": str(divergence)}
    return {"identical": True, "steps": report.steps, "text": str(report)}


@contextmanager
def _silent(_title: str) -> Iterator[Meter]:
    yield _Quiet()


class _Quiet:
    def update(self, done: int, total: int | None, now: float) -> None:
        """Tells nobody."""


# --- every step


@dataclass(frozen=True, slots=True)
class _Row:
    """A step's lane as it was recorded."""

    step: int
    group: int
    lane: str
    planned: float
    started: float
    finished: float
    stages: tuple[tuple[float, float], ...]


STEPS = ["step", "group", "lane", "planned", "started", "finished", "count", "stage_started", "stage_finished"]
SLICES = ["step", "sequence", "rank", "start", "length", "samples", "lane"]


def _predict(hardware: Path, cost: CostModel, file: Path) -> None:
    """Of lanes with slices on one rank: what copies and lockstep take is no step's own."""
    shapes = _shapes(hardware)
    heats = Heats(cost.throttle) if isinstance(cost, Throttled) and cost.throttle.slope else None
    before: dict[int, float] = {}
    found: list[tuple[Any, ...]] = []
    for row in _rows(hardware):
        shape = shapes.get((row.step, row.lane))
        if shape is not None:
            gap = row.started - before.get(row.group, 0.0)
            waited = row.planned - before.get(row.group, 0.0)
            idle = not 0 <= waited < NOTHING_TO_DO
            gaps = (None, None) if idle else (gap, cost.host(shape))
            for stage, (started, finished) in enumerate(row.stages):
                predicted = _stage(cost, heats, row, shape, stage, started)
                found.append(
                    (
                        row.step, row.lane, stage, kind(shape), shape.tokens, shape.sequences, finished - started,
                        predicted, *(gaps if stage == 0 else (None, None)),
                    )
                )  # fmt: skip
        before[row.group] = row.finished
    columns: list[Any] = list(zip(*found, strict=True)) or [[] for _ in PREDICTED]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PREDICTED, strict=True)]
    pq.write_table(pa.table(arrays, PREDICTED), file)


def _stage(cost: CostModel, heats: Heats | None, row: _Row, shape: Shape, stage: int, started: float) -> float:
    alone = cost.stage(shape, stage)
    if heats is None or not shape.prefill_tokens:
        return alone.device_time
    return alone.device_time * heats.pass_through((row.group, stage), started, alone.device_time, alone.compute)


def _rows(hardware: Path) -> Iterator[_Row]:
    """Repetitions, which only a simulated backend has, are told as steps of their own."""
    for row in table(hardware, "steps", STEPS).to_pylist():
        if row["count"] > 1:
            raise SettingError(f"{hardware}: merged steps; run it with backend.skip_ahead=false")
        stages: tuple[tuple[float, float], ...] = ((row["started"], row["finished"]),)
        if row["stage_started"]:
            stages = tuple(zip(row["stage_started"], row["stage_finished"], strict=True))
        times = (row["planned"], row["started"], row["finished"])
        yield _Row(row["step"], row["group"], row["lane"], *times, stages)


def _shapes(hardware: Path) -> dict[tuple[int, str], Shape]:
    parts: dict[tuple[int, str], list[Slice]] = {}
    for step, sequence, rank, start, length, samples, lane in zip(
        *table(hardware, "slices", SLICES).to_pydict().values(), strict=True
    ):
        parts.setdefault((step, lane), []).append(Slice(sequence, 0, rank, start, length, samples, ()))
    return {key: Shape.of(slices) for key, slices in parts.items() if len({part.rank for part in slices}) == 1}
