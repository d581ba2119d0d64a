"""A run read back from its folder: what came in when, what was decided at which instant, how long it took."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.core import Abort, Arrive, Request, Slice, Slo, Spec
from playground.trace import read


@dataclass(frozen=True, slots=True)
class Commit:
    """One row of `steps`: a lane of a step that came back."""

    step: int
    lane: str
    launched: float
    started: float
    finished: float
    stage_finished: tuple[float, ...]
    """On each stage; of one stage: `finished`."""
    stage_started: tuple[float, ...] = ()
    """On each stage, where there are several."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was launched: everything that a policy chose of a step."""

    planned: float
    group: int
    slices: tuple[Slice, ...]
    copied_blocks: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A run, ready to be played again. Lists are in the order of events."""

    spec: Spec
    arrivals: dict[int, list[Arrive | Abort]]
    """By the look that took them in."""
    looks: list[tuple[float, int]]
    """(clock, commits known by then)"""
    commits: list[Commit]
    decisions: dict[int, Decision]
    """By step."""
    returned: dict[int, tuple[int, int | None, str]]
    """By request: tokens it got, tokens that its workload said would come, outcome."""
    whole: bool
    """Whether the run came to its end."""


def load(run: Path | str) -> Recording:
    """Read a run's folder. `ValueError` if its trace cannot be replayed."""
    steps = read(run, "steps").to_pylist()
    if any(row["count"] > 1 for row in steps):
        raise ValueError(f"{run} was simulated with merged steps: run it again with backend.skip_ahead=false")
    arrived, ended = read(run, "arrivals").to_pylist(), read(run, "requests").to_pylist()
    known = {row["id"]: row["output_length"] for row in arrived}
    returned = {row["id"]: (row["output_length"], known[row["id"]], row["outcome"]) for row in ended}
    return Recording(
        spec=Spec(**json.loads((Path(run) / "run.json").read_text())["spec"]),
        arrivals=_arrivals(arrived, returned, read(run, "events").to_pylist()),
        looks=[(row["now"], row["commits"]) for row in read(run, "looks").to_pylist()],
        commits=[_commit(row) for row in steps],
        decisions=_decisions(steps, read(run, "slices").to_pylist()),
        returned=returned,
        whole=(Path(run) / "steps.parquet").exists(),
    )


def _commit(row: dict[str, Any]) -> Commit:
    stages = tuple(row["stage_finished"] or (row["finished"],))
    started = tuple(row["stage_started"] or ())
    return Commit(row["step"], row["lane"], row["launched"], row["started"], row["finished"], stages, started)


def _arrivals(
    arrived: list[dict[str, Any]], returned: dict[int, tuple[int, int | None, str]], events: list[dict[str, Any]]
) -> dict[int, list[Arrive | Abort]]:
    arrivals: dict[int, list[Arrive | Abort]] = defaultdict(list)
    for row in arrived:
        tokens, _, outcome = returned.get(row["id"], (None, None, ""))
        arrivals[row.pop("look")].append(Arrive(_request(row, tokens if outcome == "finished" else None)))
    for row in events:
        if row["kind"] == "abort":
            arrivals[row["look"]].append(Abort(row["sequence"]))
    return arrivals


def _request(row: dict[str, Any], returned: int | None) -> Request:
    """As it was, but that its output length is the one that came."""
    slo = Slo(row.pop("ttft_slo"), row.pop("tpot_slo"), row.pop("e2el_slo"))
    hashes, known = tuple(row.pop("hashes") or ()), row.pop("output_length")
    return Request(**row, output_length=known if returned is None else returned, hashes=hashes, slo=slo)


def _decisions(steps: list[dict[str, Any]], slices: list[dict[str, Any]]) -> dict[int, Decision]:
    parts: dict[int, list[Slice]] = defaultdict(list)
    for row in slices:
        parts[row.pop("step")].append(Slice(**row | {"blocks": tuple(row["blocks"])}))
    copied: dict[int, int] = defaultdict(int)
    for row in steps:
        copied[row["step"]] += row["copied_blocks"]
    return {
        row["step"]: Decision(row["planned"], row["group"], tuple(parts[row["step"]]), copied[row["step"]])
        for row in steps
    }
