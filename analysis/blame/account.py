"""One request's time, taken apart: from its arrival to its end every moment has one cause, and so the parts sum to it.

A request waits, is computed in a step, or is left out of one. Which it is, and why, follows from the trace alone: what
each step held, how many ran, how many blocks were free after it had been planned.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.metrics import latencies
from analysis.tokens import Array
from playground import trace

STEP = (
    "step", "group", "lane", "planned", "launched", "started", "finished", "host", "prefill_tokens", "decode_tokens",
    "sequences", "waiting", "running", "blocks_free", "count", "ticks",
)  # fmt: skip

CAUSES = {
    "front end": "nobody had looked for it yet",
    "step under way": "waited for a step that was planned before it came",
    "other prompts": "waited while steps were given to other prompts",
    "memory": "waited: fewer KV blocks were free than it needs; held by",
    "seats": "waited: as many sequences ran as may",
    "queue": "waited behind others that had come before and had not got in",
    "held back": "waited though there was room and nobody before it: the policy's order or budget",
    "host": "planning and launching its steps",
    "device busy": "launched, and waited for the device",
    "own prompt": "its share of steps with its prompt",
    "same step": "others' share of steps with its prompt",
    "computed again": "its share of steps with tokens whose KV was taken from it",
    "decode": "its decodes, as long as steps of nothing but decodes take",
    "beside prompts": "what prompts of others in the same step added to its decodes",
    "turn": "between its steps, while others were in flight",
    "left out": "steps of others while it could have decoded",
}
"""In the order of a request's life."""


FLYING = 64
"""Steps that may be in flight before one."""


class Segment(NamedTuple):
    """A stretch of a request's time, in seconds of the run. `others`: whose doing it was, with weights."""

    begin: float
    end: float
    cause: str
    step: int | None = None
    others: tuple[tuple[int, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Trace:
    """A run's tables, by what an account asks for. Reading them takes time in their size; an account, in the steps of
    its request's life."""

    folder: Path
    requests: pd.DataFrame = field(repr=False)
    """With ttft, tpot and e2el, by id."""
    taken: Mapping[int, float] = field(repr=False)
    """When each was first seen."""
    prompts: Mapping[int, int] = field(repr=False)
    steps: Mapping[int, Sequence[Any]] = field(repr=False)
    """Of each group, in the order in which they were planned."""
    slices: pd.DataFrame = field(repr=False)
    """By sequence, in the order of steps."""
    lost: Mapping[int, Sequence[float]] = field(repr=False)
    """When each lost its KV."""
    group_of: Mapping[int, int] = field(repr=False)
    """By rank."""
    rank_of: Mapping[int, int] = field(repr=False)
    lockstep: bool
    blocks: int
    block_size: int
    max_seqs: int
    """Blocks and sequences: of each rank."""

    @cached_property
    def planned(self) -> dict[int, list[float]]:
        return {group: [row.planned for row in rows] for group, rows in self.steps.items()}

    @cached_property
    def by_step(self) -> dict[int, list[Any]]:
        """Lanes with slices of each step."""
        found: dict[int, list[Any]] = {}
        for rows in self.steps.values():
            for row in rows:
                found.setdefault(row.step, []).append(row)
        return found

    @cached_property
    def _sequences(self) -> Array:
        found: Array = self.slices["sequence"].to_numpy()
        return found

    def ahead_of(self, id: int, since: float) -> Ahead:
        """Those that came before a request and had not got in by then."""
        rows = self.requests
        mine = rows.loc[id]
        admitted = rows["admitted"].fillna(rows["finished"])
        before = rows[(rows["arrival"] < mine["arrival"]) & (admitted > since) & (rows["rank"] == mine["rank"])]
        order = before.assign(admitted=admitted.loc[before.index]).sort_values(["admitted", "arrival"])
        return Ahead(order["admitted"].tolist(), order["id"].tolist())

    def slices_of(self, id: int) -> pd.DataFrame:
        begin, end = np.searchsorted(self._sequences, [id, id + 1])
        return self.slices.iloc[begin:end]

    @cached_property
    def _order(self) -> tuple[Array, Array]:
        """(where the slices of a step are, by step; the steps)"""
        steps = self.slices["step"].to_numpy()
        order = np.argsort(steps, kind="stable")
        return order, steps[order]

    def _tokens(self, step: int, rank: int) -> pd.Series[int]:
        """Of each sequence in a step: how many it has KV of. Of ranks in lockstep only this one's."""
        order, steps = self._order
        begin, end = np.searchsorted(steps, [step, step + 1])
        rows = self.slices.iloc[order[begin:end]]
        if self.lockstep:
            rows = rows[rows["rank"] == rank]
        return (rows["start"] + rows["length"]).groupby(rows["sequence"]).max()

    def holders(self, step: int, id: int, most: int = 5) -> tuple[tuple[int, float], ...]:
        """Others that a step computed and whose KV was largest, by their share of the KV of all of it."""
        tokens = self._tokens(step, self.rank_of.get(id, 0))
        tokens = tokens[tokens.index != id].sort_values(ascending=False, kind="stable")
        total = float(tokens.sum())
        return tuple((int(one), float(held) / total) for one, held in tokens.head(most).items()) if total else ()

    def crowd(self, row: Any, rank: int) -> tuple[int, int]:
        """(sequences that run, blocks free) after a step was planned.

        Of ranks in lockstep a trace has sums only: there it is what the step shows of this one, at least so many
        sequences and at most so many blocks.
        """
        if not self.lockstep:
            return int(row.running), int(row.blocks_free)
        tokens = self._tokens(row.step, rank)
        return len(tokens), self.blocks - int((-(-tokens // self.block_size)).sum())

    @cached_property
    def prefills(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """By step: (sequence, tokens) of what is no decode."""
        rows = self.slices[self.slices["start"] < self.slices["sequence"].map(self.prompts)]
        found: dict[int, list[tuple[int, int]]] = {}
        for step, sequence, length in zip(rows["step"], rows["sequence"], rows["length"], strict=True):
            found.setdefault(int(step), []).append((int(sequence), int(length)))
        return {step: tuple(parts) for step, parts in found.items()}

    @cached_property
    def decode_seconds(self) -> tuple[Array, Array]:
        """(sequences, median seconds) of steps of nothing but decodes."""
        found: dict[int, list[float]] = {}
        for rows in self.steps.values():
            for row in rows:
                if not row.prefill_tokens and row.decode_tokens:
                    found.setdefault(int(row.sequences), []).append(_alone(row) / row.count)
        sizes = sorted(found)
        return np.array(sizes, dtype=float), np.array([np.median(found[size]) for size in sizes])

    def decode_takes(self, sequences: int) -> float | None:
        """Seconds of a step of so many decodes; None if the run has none to go by."""
        sizes, seconds = self.decode_seconds
        return float(np.interp(sequences, sizes, seconds)) if len(sizes) else None


class Ahead(NamedTuple):
    """Requests in the order in which they got in."""

    admitted: list[float]
    ids: list[int]

    def at(self, time: float) -> int | None:
        """Who was the next to get in; None if nobody was before."""
        place = bisect_right(self.admitted, time)
        return int(self.ids[place]) if place < len(self.ids) else None


def _alone(row: Any) -> float:
    """Seconds on the device, all repetitions."""
    return float(row.finished - row.started - (row.count - 1) * row.host)


def read(folder: Path) -> Trace:
    """`FileNotFoundError`, in a line, if it is no run's folder."""
    requests = (
        latencies(trace.read(folder, "requests").to_pandas()).set_index("id", drop=False).rename_axis(None).sort_index()
    )
    spec = json.loads((folder / "run.json").read_text(encoding="utf-8"))["spec"]
    looks = trace.read(folder, "looks", ["now"]).column("now").to_pylist()
    arrivals = trace.read(folder, "arrivals", ["id", "look", "prompt_length"]).to_pylist()
    rows = trace.read(folder, "steps", list(STEP)).to_pandas()
    steps: dict[int, list[Any]] = {}
    for row in rows.sort_values(["planned", "step"]).itertuples(index=False):
        if row.sequences:
            steps.setdefault(int(row.group), []).append(row)
    columns = ["step", "sequence", "start", "length", "lane", "rank"]
    slices = trace.read(folder, "slices", columns).to_pandas().sort_values(["sequence", "step"], ignore_index=True)
    lost: dict[int, list[float]] = {}
    for event in trace.read(folder, "events", ["now", "kind", "sequence"]).to_pylist():
        if event["kind"] in ("recompute", "swap"):
            lost.setdefault(event["sequence"], []).append(event["now"])
    return Trace(
        folder,
        requests,
        {row["id"]: looks[min(row["look"], len(looks) - 1)] for row in arrivals},
        {row["id"]: row["prompt_length"] for row in arrivals},
        steps,
        slices,
        lost,
        {rank: 0 if spec["lockstep"] else rank for rank in range(spec["ranks"])},
        {int(id): int(rank) for id, rank in requests["rank"].dropna().items()},
        spec["lockstep"] and spec["ranks"] > 1,
        spec["blocks"],
        spec["block_size"],
        spec["max_seqs"],
    )


# --- one request


def account(run: Trace, id: int) -> list[Segment]:
    """Its whole time, without gaps. `ValueError` if the run has no such request, or it never ended."""
    if id not in run.requests.index:
        raise ValueError(f"--request {id}: no such request ended in {run.folder}")
    row = run.requests.loc[id]
    arrival, end = float(row["arrival"]), float(row["finished"])
    group = run.group_of[int(row["rank"])] if row["rank"] == row["rank"] else 0
    found: list[Segment] = []
    cursor = arrival

    def add(until: float, cause: str, step: int | None = None, others: tuple[tuple[int, float], ...] = ()) -> None:
        nonlocal cursor
        until = min(until, end)
        if until > cursor:
            found.append(Segment(cursor, until, cause, step, others))
            cursor = until

    add(run.taken.get(id, arrival), "front end")
    reached = 0
    waits = True
    losses = list(run.lost.get(id, ()))
    for start, length, lane in _visits(run, id):
        while losses and losses[0] <= lane.planned:
            add(losses.pop(0), "left out")
            waits = True
        before = (
            _waiting(run, id, group, cursor, lane.planned, reached) if waits else _between(run, group, cursor, lane)
        )
        for segment in before:
            add(segment.end, segment.cause, segment.step, segment.others)
        waits = False
        add(lane.launched, "host", lane.step)
        add(lane.started, "device busy", lane.step)
        for until, cause, others in _computing(run, id, lane, start, length, reached):
            add(until, cause, lane.step, others)
        reached = max(reached, start + length)
    if cursor < end:
        for segment in (
            _waiting(run, id, group, cursor, end, reached) if waits or losses else [Segment(cursor, end, "host")]
        ):
            add(segment.end, segment.cause, segment.step, segment.others)
    return found


def _visits(run: Trace, id: int) -> Iterator[tuple[int, int, Any]]:
    """(start, length, its lane) of every slice, in order of time."""
    rows = run.slices_of(id)
    visits = []
    for step, start, length, name in zip(rows["step"], rows["start"], rows["length"], rows["lane"], strict=True):
        lane = next(one for one in run.by_step[int(step)] if one.lane == name)
        visits.append((int(start), int(length), lane))
    return iter(sorted(visits, key=lambda visit: (visit[2].planned, visit[2].step)))


def _waiting(run: Trace, id: int, group: int, begin: float, end: float, reached: int) -> Iterator[Segment]:
    """Why it was not in the steps that were planned meanwhile. `reached`: tokens that it had KV of before."""
    needed = -(-max(run.prompts[id], reached) // run.block_size)
    rows, planned = run.steps.get(group, ()), run.planned.get(group, [])
    first, last = bisect_left(planned, begin), bisect_left(planned, end)
    ahead = run.ahead_of(id, begin)
    until = planned[first] if first < last else end
    if until > begin:
        before = rows[first - 1] if first else None
        if before is not None and before.finished > begin:
            yield Segment(begin, until, "step under way", before.step, _blamed(run, before, id))
        else:
            yield Segment(begin, until, "host")
    for place in range(first, last):
        row = rows[place]
        until = planned[place + 1] if place + 1 < last else end
        cause = _reason(run, id, row, needed)
        others: tuple[tuple[int, float], ...] = ()
        if cause == "other prompts":
            others = _blamed(run, row, id)
        elif cause == "memory":
            others = run.holders(row.step, id)
        elif cause == "held back" and (head := ahead.at(planned[place])) is not None:
            cause, others = "queue", ((head, 1.0),)
        yield Segment(planned[place], until, cause, row.step, others)


def _reason(run: Trace, id: int, row: Any, needed: int) -> str:
    """Of a step that was planned without it while it waited; `needed`: blocks."""
    rank = run.rank_of.get(id, 0)
    running, free = run.crowd(row, rank)
    if running >= run.max_seqs:
        return "seats"
    if free < needed:
        return "memory"
    others = [other for other, _ in run.prefills.get(row.step, ()) if other != id]
    if any(not run.lockstep or run.rank_of.get(other) == rank for other in others):
        return "other prompts"
    return "held back"


def _between(run: Trace, group: int, begin: float, lane: Any) -> Iterator[Segment]:
    """From the end of a step with it to the planning of the next one with it."""
    rows, planned = run.steps[group], run.planned[group]
    first, last = bisect_left(planned, begin), bisect_left(planned, lane.planned)
    until = planned[first] if first < last else lane.planned  # the next one is its own
    flying = [row for row in rows[max(first - FLYING, 0) : first] if row.finished > begin]
    if flying and begin < until:
        soonest = min(flying, key=lambda row: row.finished)
        yield Segment(begin, min(soonest.finished, until), "turn", soonest.step, _blamed(run, soonest))
    yield Segment(begin, until, "host", lane.step)
    for place in range(first, last):
        until = planned[place + 1] if place + 1 < last else lane.planned
        yield Segment(planned[place], until, "left out", rows[place].step, _blamed(run, rows[place]))


def _computing(
    run: Trace, id: int, lane: Any, start: int, length: int, reached: int
) -> Iterator[tuple[float, str, tuple[tuple[int, float], ...]]]:
    """(until, cause, others) within a step that it is in."""
    others = _blamed(run, lane, id)
    if start < run.prompts[id] or start < reached:
        cause = "computed again" if start < reached else "own prompt"
        tokens = lane.prefill_tokens + lane.decode_tokens
        share = min(length / tokens, 1.0) if tokens else 1.0
        yield lane.started + share * (lane.finished - lane.started), cause, ()
        yield lane.finished, "same step", others
        return
    if lane.count > 1:  # nothing but decodes, again and again
        yield lane.started + _alone(lane), "decode", ()
        yield lane.finished, "host", ()
        return
    usual = run.decode_takes(int(lane.sequences)) if others else None
    if usual is not None:
        yield min(lane.started + usual, lane.finished), "decode", ()
        yield lane.finished, "beside prompts", others
    else:
        yield lane.finished, "decode", ()


def _blamed(run: Trace, row: Any, id: int | None = None) -> tuple[tuple[int, float], ...]:
    """Others whose prompts are in a step, by their share of its prefill tokens."""
    parts = [(sequence, tokens) for sequence, tokens in run.prefills.get(row.step, ()) if sequence != id]
    total = sum(tokens for _, tokens in parts)
    return tuple((sequence, tokens / total) for sequence, tokens in parts)


# --- sums


def sums(segments: Sequence[Segment], since: float, until: float) -> dict[str, float]:
    """Seconds by cause within a stretch, in the order of `CAUSES`."""
    found = dict.fromkeys(CAUSES, 0.0)
    for one in segments:
        found[one.cause] += max(min(one.end, until) - max(one.begin, since), 0.0)
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def culprits(segments: Sequence[Segment], cause: str, most: int = 3) -> list[tuple[int, float]]:
    """Who took how many seconds of it, the worst first."""
    found: dict[int, float] = {}
    for one in segments:
        if one.cause == cause:
            for id, weight in one.others:
                found[id] = found.get(id, 0.0) + weight * one.seconds
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]


def longest(segments: Sequence[Segment], cause: str, most: int = 3) -> list[tuple[int, float]]:
    """Steps in which it was so, with seconds, the longest first."""
    found: dict[int, float] = {}
    for one in segments:
        if one.cause == cause and one.step is not None:
            found[one.step] = found.get(one.step, 0.0) + one.seconds
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:most]
