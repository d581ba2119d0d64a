"""A policy in the setting of the bounds: every step takes one second, requests come at whole seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from analysis.metrics import load
from experiments import settings
from experiments.build import Plan, Workload, build, make, plan_of
from experiments.composing import composed
from experiments.groundtruth.recorder import InMemory
from experiments.regret.problem import METRICS, Job, Room
from experiments.settings import SettingError, Settings
from playground.backend import Backend
from playground.core import Request
from playground.loop import serve
from playground.sim.backend import SimBackend
from playground.sim.contention import TURNS
from playground.sim.cost import Linear
from playground.sim.durations import Demanding
from playground.workload.source import OpenLoop

ROUND = 1.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a policy's schedule comes to, in rounds, by metric; `losses`: how often KV was given up."""

    values: dict[str, float]
    losses: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """A backend whose steps take a round each, whatever they hold; `kv.blocks` are there, whatever the device has."""

    def make(self, plan: Plan) -> Backend:
        blocks = plan.settings.kv.blocks
        if blocks is None:
            raise SettingError("regret needs a memory to plan with: give kv.blocks=NUMBER")
        return SimBackend(plan.spec(blocks, forwards_tokens=True, repeats=True), Demanding(Linear(ROUND), 1), TURNS)

    def where(self, plan: Plan) -> str:
        return "rounds"


def in_rounds(given: Sequence[str]) -> Settings:
    """The settings of these overrides, with steps of one round."""
    wanted = settings.read(composed(list(given)))
    if wanted.parallel.stages > 1 or wanted.parallel.replicas > 1:
        raise SettingError("regret is told of one device: leave out parallel=, or take parallel=single")
    wanted.backend = {"_target_": f"{__name__}.Rounds"}
    return wanted


def room(wanted: Settings) -> Room:
    """Of one round."""
    spec = Rounds().make(plan_of(wanted)).spec
    return Room(spec.blocks, spec.block_size, spec.max_seqs, spec.max_tokens)


def requests(wanted: Settings, seconds: float, most: int | None) -> list[Request]:
    """Of the workload, with `seconds` of it to a round; they come at the round after."""
    workload: Workload = make("workload", wanted.workload, Workload)
    drawn = getattr(workload, "draw", None)
    if drawn is None:
        raise SettingError(
            "workload: its arrivals answer to completions, so nobody knows them beforehand; take another"
        )
    found = [_plain(number, one, seconds) for number, one in enumerate(islice(drawn(wanted.seed), most))]
    if not found:
        raise SettingError("workload: it has no request; choose another or raise its number or duration")
    return found


def _plain(number: int, request: Request, seconds: float) -> Request:
    """Without prefixes: shared blocks would be nobody's, and no bound counts them."""
    if request.output_length is None:
        raise SettingError(f"workload: request {request.id} has no output length, so there is nothing to plan with")
    return Request(
        number, _round(request.arrival, seconds), request.prompt_length, request.max_tokens, request.output_length
    )


def _round(arrival: float, seconds: float) -> float:
    return float(ceil(arrival / seconds - 1e-9))


def jobs(found: Sequence[Request]) -> list[Job]:
    """As the bounds take them."""
    return [Job(one.id, int(one.arrival), one.prompt_length, one.output_length or one.max_tokens) for one in found]


def play(wanted: Settings, found: Sequence[Request]) -> Played:
    """Serve them. Raises SettingError if one of them is turned away."""
    parts = build(wanted)
    recorder = InMemory()
    serve(OpenLoop(list(found)), parts.scheduler, parts.backend, recorder)
    if recorder.unserved:
        first = recorder.unserved[0]
        raise SettingError(f"request {first.request.id} was {first.outcome} ({first.why}): raise kv.blocks")
    figures = {"latency": recorder.e2el.mean(), "ttft": recorder.ttft.mean(), "makespan": recorder.makespan}
    return Played({name: float(figures[name]) / ROUND for name in METRICS}, recorder.preemptions)


# --- a run that was


def recorded(folder: Path) -> tuple[list[str], Any, float]:
    """Overrides that describe what a run had room for, its policy, and the mean seconds of its steps."""
    try:
        config = OmegaConf.load(folder / "config.yaml")
        spec = json.loads((folder / "run.json").read_text(encoding="utf-8"))["spec"]
    except (OSError, ValueError, KeyError) as error:
        raise SettingError(f"{folder} is not the folder of a run: {error}") from error
    if (devices := spec["stages"] * spec["ranks"]) > 1:
        raise SettingError(f"{folder}: regret is told of one device, this run had {devices}")
    steps = load(folder).steps
    if steps.empty:
        raise SettingError(f"{folder}: the run has no step")
    spent = float((steps["finished"] - steps["started"]).sum() / steps["count"].sum())
    room = {"kv.blocks": "blocks", "kv.block_size": "block_size", "limits.max_seqs": "max_seqs"}
    given = [f"{option}={spec[name]}" for option, name in (room | {"limits.max_tokens": "max_tokens"}).items()]
    return given, OmegaConf.to_container(OmegaConf.select(config, "policy"), resolve=True), spent


def served(folder: Path, seconds: float, most: int | None) -> list[Request]:
    """What a run finished, in order of arrival, in its rounds."""
    table = load(folder).requests
    finished = table[table["outcome"] == "finished"].sort_values(["arrival", "id"], kind="stable")
    rows = finished.head(most) if most else finished
    if rows.empty:
        raise SettingError(f"{folder}: the run finished no request")
    columns = (rows[name].tolist() for name in ("arrival", "prompt_length", "max_tokens", "output_length"))
    return [
        Request(number, _round(arrival, seconds), int(prompt), int(most_tokens), int(output))
        for number, (arrival, prompt, most_tokens, output) in enumerate(zip(*columns, strict=True))
    ]
