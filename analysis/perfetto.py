"""A run as a trace for the Perfetto UI (https://ui.perfetto.dev) or chrome://tracing: a process a replica, with a track
for its host, each stage and each further lane; counters; requests in tracks of their own, with arrows to their steps.

Format: Trace Event Format (Chrome), JSON, times in microseconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import IO, Any

import pandas as pd

from analysis.metrics import Tables, load
from playground import trace

REQUESTS = 1_000_000
"""The process of all requests; replicas are processes 1, 2, ..., for 0 is the idle process to Perfetto."""
HOST, FIRST = 0, 1
"""Tracks of a replica: its host, then stages and lanes."""
ROOM = 1000
"""Between the numbers of two processes' tracks: Perfetto takes equal ones for one thread that moved."""
LANES = {"main": "", "copy_in": "copies in", "copy_out": "copies out"}
Event = dict[str, Any]


def events(run: Path, decodes: bool = False) -> Iterator[Event]:
    """All of a run. `decodes`: arrows to every step of a request, not only to those with its prompt and first token."""
    tables = load(run)
    tracks = Tracks.of(tables.steps)
    yield from tracks.names()
    yield from _steps(tables, tracks)
    yield from _counters(run, tables)
    yield from _requests(run, tables, tracks, decodes)


@dataclass(frozen=True, slots=True)
class Tracks:
    """Which track a lane has on which stage: (group, lane, stage) to a number."""

    places: Mapping[tuple[int, str, int], int]

    @classmethod
    def of(cls, steps: pd.DataFrame) -> Tracks:
        seen: dict[tuple[int, str, int], None] = {}
        for group, lane, stages in zip(steps["group"], steps["lane"], steps["stage_started"], strict=True):
            for stage in range(1 if stages is None else len(stages)):
                seen[int(group), str(lane), stage] = None
        order = sorted(seen, key=lambda one: (one[0], one[1] != "main", one[1], one[2]))
        places: dict[tuple[int, str, int], int] = {}
        for key in order:
            places[key] = FIRST + sum(other[0] == key[0] for other in places)
        return cls(places)

    def names(self) -> Iterator[Event]:
        groups = sorted({group for group, _, _ in self.places})
        stages = max((stage for _, _, stage in self.places), default=0) + 1
        for group in groups:
            yield _named("process_name", group, 0, f"replica {group}" if len(groups) > 1 else "engine")
            yield _named("thread_name", group, HOST, "host: plans and launches")
        for (group, lane, stage), track in self.places.items():
            parts = [LANES.get(lane, f"lane {lane}"), f"stage {stage}" if stages > 1 else ""]
            yield _named("thread_name", group, track, ", ".join(filter(None, parts)) or "device")
            order = {"sort_index": track}
            yield {"ph": "M", "name": "thread_sort_index", **_where(group, track), "args": order}
        yield _named("process_name", REQUESTS, 0, "requests")


def _where(process: int, track: int) -> Event:
    """`process`: a group, or `REQUESTS`."""
    return {"pid": process + 1, "tid": (process + 1) * ROOM + track}


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, **_where(process, track), "args": {"name": name}}


def _span(name: str, process: int, track: int, begin: float, end: float, **args: Any) -> Event:
    # Both ends in whole nanoseconds: what lies within another must not end later for having been rounded.
    since, until = round(float(begin) * 1e9), round(float(end) * 1e9)
    kind = "request" if process == REQUESTS else "step"
    times = {"ts": since / 1e3, "dur": (until - since) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, **_where(process, track), **times, "args": args}


def _micros(seconds: float) -> float:
    return round(float(seconds) * 1e9) / 1e3


# --- steps


def _steps(tables: Tables, tracks: Tracks) -> Iterator[Event]:
    """Each repetition by itself; `step` is the one that it repeats."""
    for row in tables.repetitions.itertuples():
        group, lane = int(row.group), str(row.lane)
        args = {
            "step": int(row.step),
            "prefill_tokens": int(row.prefill_tokens),
            "decode_tokens": int(row.decode_tokens),
            "blocks_free": int(row.blocks_free),
        }
        name = _title(row)
        if lane == "main" and row.launched > row.planned:
            yield _span(f"plan {name}", group, HOST, row.planned, row.launched, **args)
        for stage, (begin, end) in enumerate(_visits(row)):
            yield _span(name, group, tracks.places[group, lane, stage], begin, end, **args)


def _visits(row: Any) -> list[tuple[float, float]]:
    if row.stage_started is None or isinstance(row.stage_started, float):
        return [(row.started, row.finished)]
    return list(zip(row.stage_started, row.stage_finished, strict=True))


def _title(row: Any) -> str:
    """What is in it: `512 + 12` are prefill tokens and decodes."""
    if not row.prefill_tokens and not row.decode_tokens:
        return "copy"
    if not row.prefill_tokens:
        return f"decode {row.decode_tokens}"
    return f"prefill {row.prefill_tokens}" + (f" + {row.decode_tokens}" if row.decode_tokens else "")


def _counters(run: Path, tables: Tables) -> Iterator[Event]:
    """As they were after each step was planned."""
    queues = trace.read(run, "steps", ["step", "lane", "waiting", "running"]).to_pandas()
    rows = tables.repetitions.merge(queues.drop_duplicates(["step", "lane"]), on=["step", "lane"])
    for row in rows.itertuples():
        at = {"ph": "C", "pid": int(row.group) + 1, "ts": _micros(row.planned)}
        yield at | {"name": "requests", "args": {"running": int(row.running), "waiting": int(row.waiting)}}
        yield at | {"name": "KV blocks in use", "args": {"blocks": tables.blocks - int(row.blocks_free)}}


# --- requests


def _requests(run: Path, tables: Tables, tracks: Tracks, decodes: bool) -> Iterator[Event]:
    """Waiting, prompt, answer; one after another in as few tracks as there are requests at a time."""
    preempted = _preemptions(run)
    steps = _launches(tables)
    chunks = _chunks(tables, decodes)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    count = 0
    for row in tables.requests.sort_values(["arrival", "id"]).itertuples():
        while busy and busy[0][0] <= row.arrival:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, count)
            yield _named("thread_name", REQUESTS, count, f"request slot {count}")
            count += 1
        track = heappop(free)
        heappush(busy, (float(row.finished), track))
        yield from _phases(row, track, preempted.get(int(row.id), []))
        yield from _arrows(int(row.id), row, track, chunks.get(int(row.id), []), steps, tracks)


def _phases(row: Any, track: int, preempted: Iterable[float]) -> Iterator[Event]:
    id, end = int(row.id), float(row.finished)
    about = {
        "request": id, "prompt": int(row.prompt_length), "answer": int(row.output_length), "outcome": str(row.outcome),
        "cached_tokens": int(row.cached_tokens), "preemptions": int(row.preemptions),
    }  # fmt: skip
    admitted = end if pd.isna(row.admitted) else float(row.admitted)
    first = end if pd.isna(row.first_token) else float(row.first_token)
    yield _span(f"request {id}", REQUESTS, track, row.arrival, end, **about)
    for name, begin, until in (("waits", row.arrival, admitted), ("prompt", admitted, first), ("answer", first, end)):
        if until > begin:
            yield _span(name, REQUESTS, track, begin, until, request=id)
    for at in preempted:
        yield {"ph": "i", "name": "loses its KV", **_where(REQUESTS, track), "ts": _micros(at), "s": "t"}


def _preemptions(run: Path) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in trace.read(run, "events", ["now", "kind", "sequence"]).to_pylist():
        if row["kind"] in ("recompute", "swap"):
            found.setdefault(row["sequence"], []).append(row["now"])
    return found


def _launches(tables: Tables) -> dict[tuple[int, str], tuple[int, float]]:
    """By step and lane: its group, and when it began."""
    rows = tables.steps
    return {
        (int(step), str(lane)): (int(group), float(started))
        for step, lane, group, started in zip(rows["step"], rows["lane"], rows["group"], rows["started"], strict=True)
    }


def _chunks(tables: Tables, decodes: bool) -> dict[int, list[tuple[int, str]]]:
    """By request: steps with its prompt, or all of its steps."""
    slices = tables.slices
    if not decodes:
        prompts = tables.requests.set_index("id")["prompt_length"]
        slices = slices[slices["start"] < slices["sequence"].map(prompts)]
    found: dict[int, list[tuple[int, str]]] = {}
    for step, sequence, lane in zip(slices["step"], slices["sequence"], slices["lane"], strict=True):
        found.setdefault(int(sequence), []).append((int(step), str(lane)))
    return found


def _arrows(
    id: int,
    row: Any,
    track: int,
    chunks: list[tuple[int, str]],
    steps: Mapping[tuple[int, str], tuple[int, float]],
    tracks: Tracks,
) -> Iterator[Event]:
    """From the request, through the steps, in order of time."""
    places = sorted((steps[key][1], steps[key][0], key[1]) for key in chunks)
    if not places:
        return
    flow = {"cat": "request", "name": "steps", "id": id}
    yield flow | {"ph": "s", **_where(REQUESTS, track), "ts": _micros(row.arrival)}
    for number, (started, group, lane) in enumerate(places, 1):
        kind = {"ph": "f", "bp": "e"} if number == len(places) else {"ph": "t"}
        # A hair inside of the step: an arrow belongs to what lies around it.
        yield flow | kind | {**_where(group, tracks.places[group, lane, 0]), "ts": _micros(started + 1e-9)}


# --- the file


def within(found: Iterable[Event], since: float, until: float) -> Iterator[Event]:
    """Those of a stretch of the run, in seconds; whatever reaches into it, whole, and all names."""
    for event in found:
        begin = event.get("ts", 0.0) / 1e6
        if event["ph"] == "M" or (begin <= until and begin + event.get("dur", 0.0) / 1e6 >= since):
            yield event


def write(run: Path, file: Path, decodes: bool = False, since: float = 0.0, until: float = inf) -> int:
    """How many events went to the file: JSON, compressed if its name ends in .gz. Streamed: any run fits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    count = 0
    with _opened(part, file.suffix == ".gz") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for count, event in enumerate(within(events(run, decodes), since, until), 1):
            stream.write(("" if count == 1 else ",\n") + json.dumps(event))
        stream.write("\n]}\n")
    part.rename(file)
    return count


def _opened(file: Path, compressed: bool) -> IO[str]:
    return gzip.open(file, "wt", encoding="utf-8") if compressed else file.open("w", encoding="utf-8")


HELP = """\
A run for the Perfetto UI: open https://ui.perfetto.dev (it works on files without sending them anywhere) and drop the
file on it. A process a replica with tracks for its host, stages and lanes; counters of requests and KV blocks; every
request with its waiting, prompt and answer, and arrows to the steps that computed its prompt.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "perfetto",
        help="a trace for the Perfetto UI",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="(RUN/perfetto.json); .json.gz is a tenth as large"
    )
    parser.add_argument("--decodes", action="store_true", help="arrows to decodes, too")
    parser.add_argument(
        "--between", type=float, nargs=2, default=(0.0, inf), metavar="SECONDS", help="only this stretch of the run"
    )
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    out: Path = given.out or given.run / "perfetto.json"
    count = write(given.run, out, given.decodes, *given.between)
    print(f"{out}: {count:,} events; open it at https://ui.perfetto.dev")
    return 0
