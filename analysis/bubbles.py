"""Why pipeline stages were idle: every instant of every stage has one cause, so that causes add up to the makespan.

The makespan goes from the first arrival or launch of all groups to the last end. Copies keep no stage busy.
docs/parallel.md defines the causes for readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.occupancy import COPY_LANES
from analysis.tokens import Array

CAUSES = ("empty", "unready", "host", "upstream", "fill", "drain")
"""`empty`: nobody in the system, and no step in flight. `drain`: the stage's last work of the run is done. Else it is
the step that counts which the stage worked on next. Before its launch: `host` from when its decision could have been
taken (the last arrival or completion that the decision knew), `unready` before that. After its launch: `host` on the
first stage; `upstream` on a later one, or `fill` where the stage had not worked yet."""


class _Holes(NamedTuple):
    """A stage's idle intervals in order, one before each of its spans and one after them, of no length for some."""

    begin: Array
    end: Array
    heard: Array
    """Of the step that ended it: since when the host alone kept it from being launched; infinite after the last."""
    launched: Array


class Intervals(NamedTuple):
    """Disjoint, in order."""

    begin: Array
    end: Array

    def within(self, begin: Array, end: Array) -> Array:
        """How many seconds of each stretch they cover; none of one that ends before it begins."""
        return self._until(np.maximum(begin, end)) - self._until(begin)

    def _until(self, times: Array) -> Array:
        before = np.concatenate([[0.0], np.cumsum(self.end - self.begin)])
        index = np.searchsorted(self.begin, times, side="right")
        inside = np.minimum(times, self.end[index - 1]) - self.begin[index - 1]
        return np.where(index > 0, before[index - 1] + inside, 0.0)


def idle_causes(requests: pd.DataFrame, steps: pd.DataFrame, apart: pd.DataFrame, looks: pd.DataFrame) -> pd.DataFrame:
    """A row for each group and stage: `busy` and each of `CAUSES`, in seconds.

    Tables as traces have them; `apart`: `steps` with a row for every repetition. Of requests that have not ended only
    the steps are known. Linear but for sorting.
    """
    rows = [
        {"group": one.group, "stage": one.stage, "busy": one.busy} | _by_cause(one.holes, one.stage, one.present)
        for one in _stages(requests, steps, apart, looks)
    ]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["group", "stage", "busy", *CAUSES], dtype=float)


def idle_parts(requests: pd.DataFrame, steps: pd.DataFrame, apart: pd.DataFrame, looks: pd.DataFrame) -> pd.DataFrame:
    """The same stretch by stretch: group, stage, begin, end (seconds) and cause, in order of time on each stage."""
    parts = [
        _parts(one.holes, one.stage, one.present).assign(group=one.group, stage=one.stage)
        for one in _stages(requests, steps, apart, looks)
    ]
    columns = ["group", "stage", "begin", "end", "cause"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


class _Stage(NamedTuple):
    group: int
    stage: int
    holes: _Holes
    present: Intervals
    """When anybody was in the system, or a step in flight."""
    busy: float


def _stages(requests: pd.DataFrame, steps: pd.DataFrame, apart: pd.DataFrame, looks: pd.DataFrame) -> Iterator[_Stage]:
    served = requests[requests["outcome"] != "rejected"]
    work = apart[~apart["lane"].isin(COPY_LANES)]
    if len(work) == 0:
        return
    window = min([*served["arrival"], work["launched"].min()]), max([*served["finished"], work["finished"].max()])
    groups = sorted(work["group"].unique())
    for group in groups:
        theirs = served if len(groups) == 1 else served[served["rank"] == group]
        mine = work[work["group"] == group]
        heard = _Known.of(theirs, steps, looks, group).heard(mine["planned"].to_numpy(float))
        present = presence(theirs, mine)
        for stage, (started, finished) in enumerate(spans(mine)):
            holes = _holes(started, finished, heard, mine["launched"].to_numpy(float), window)
            busy = window[1] - window[0] - float((holes.end - holes.begin).sum())
            yield _Stage(int(group), stage, holes, present, busy)


def presence(requests: pd.DataFrame, work: pd.DataFrame) -> Intervals:
    return _union(
        np.concatenate([requests["arrival"].to_numpy(float), work["launched"].to_numpy(float)]),
        np.concatenate([requests["finished"].to_numpy(float), work["finished"].to_numpy(float)]),
    )


def _parts(holes: _Holes, stage: int, present: Intervals) -> pd.DataFrame:
    """Holes cut where their cause changes, and where somebody comes or the last one goes."""
    heard, launched = (np.clip(times, holes.begin, holes.end) for times in (holes.heard, holes.launched))
    edges = np.unique(np.concatenate([holes.begin, heard, launched, holes.end, present.begin, present.end]))
    begin, end = edges[:-1], edges[1:]
    middle = (begin + end) / 2
    hole = np.searchsorted(holes.begin, middle, side="right") - 1
    # Of holes that begin at one instant, all but the last have no length.
    inside = (hole >= 0) & (middle < holes.end[hole])
    place = np.searchsorted(present.begin, middle, side="right") - 1
    there = (place >= 0) & (middle < present.end[np.maximum(place, 0)])
    given = "host" if stage == 0 else "upstream"
    cause = np.where(middle < heard[hole], "unready", np.where(middle < launched[hole], "host", given))
    cause = np.where((cause == "upstream") & (hole == 0), "fill", cause)
    cause = np.where(hole == len(holes.begin) - 1, "drain", cause)
    cause = np.where(there, cause, "empty")
    return pd.DataFrame({"begin": begin[inside], "end": end[inside], "cause": cause[inside]})


def shares(causes: pd.DataFrame) -> dict[str, float]:
    """Of the stages' time while somebody was in the system, by cause: together they are the bubble ratio."""
    totals = causes[["busy", *CAUSES]].sum()
    present = totals.sum() - totals["empty"]
    return {cause: float(totals[cause] / present) if present else 0.0 for cause in CAUSES if cause != "empty"}


def spans(work: pd.DataFrame) -> list[tuple[Array, Array]]:
    """Of each stage, when every step was there; of one stage where the trace tells of no more."""
    if not work["stage_started"].notna().any():
        return [(work["started"].to_numpy(float), work["finished"].to_numpy(float))]
    started, finished = (np.stack(work[name].to_numpy()) for name in ("stage_started", "stage_finished"))
    return list(zip(started.T, finished.T, strict=True))


def _holes(started: Array, finished: Array, heard: Array, launched: Array, window: tuple[float, float]) -> _Holes:
    order = np.argsort(started, kind="stable")
    begin = np.concatenate([[window[0]], np.maximum.accumulate(finished[order])])
    end = np.maximum(np.concatenate([started[order], [window[1]]]), begin)
    return _Holes(begin, end, *(np.concatenate([times[order], [np.inf]]) for times in (heard, launched)))


def _by_cause(holes: _Holes, stage: int, present: Intervals) -> dict[str, float]:
    heard, launched = (np.clip(times, holes.begin, holes.end) for times in (holes.heard, holes.launched))
    whole = present.within(holes.begin, holes.end)
    unready = present.within(holes.begin, heard)[:-1].sum()
    host = present.within(heard, launched)[:-1].sum()
    given = present.within(launched, holes.end)[:-1]
    told = {
        "empty": max(0.0, (holes.end - holes.begin - whole).sum()),  # but for rounding
        "unready": unready,
        "host": host + given.sum() if stage == 0 else host,
        "upstream": 0.0 if stage == 0 else given[1:].sum(),
        "fill": 0.0 if stage == 0 else given[:1].sum(),
        "drain": whole[-1],
    }
    return {cause: float(seconds) for cause, seconds in told.items()}


class _Known(NamedTuple):
    """At each look at the clock: the last thing that had happened to a group and was known of by then."""

    looks: Array
    latest: Array

    @classmethod
    def of(cls, requests: pd.DataFrame, steps: pd.DataFrame, looks: pd.DataFrame, group: int) -> _Known:
        """`steps` in order of commits."""
        instants, commits = looks["now"].to_numpy(float), looks["commits"].to_numpy()
        finished = np.where(steps["group"].to_numpy() == group, steps["finished"].to_numpy(float), -np.inf)
        completed = np.concatenate([[-np.inf], np.maximum.accumulate(finished)])[commits]
        arrivals = np.concatenate([[-np.inf], np.sort(requests["arrival"].to_numpy(float))])
        arrived = arrivals[np.searchsorted(arrivals, instants, side="right") - 1]
        return cls(instants, np.maximum(completed, arrived))

    def heard(self, planned: Array) -> Array:
        """Since when there was but the host to wait for, for each decision.

        That is when the last thing happened that the decision knew, if it was the first to know it or follows upon such
        a one without a look between them. Others, taken when a policy had itself woken, begin when they were taken; so
        does a repetition, which nobody looked for.
        """
        look = np.searchsorted(self.looks, planned, side="right") - 1
        if not len(self.looks) or (look < 0).all():
            return planned
        order = np.argsort(planned, kind="stable")
        look = look[order]
        seen = (look >= 0) & (self.looks[look] == planned[order])
        latest = self.latest[look]
        news = seen & (latest > np.where(look > 0, self.latest[look - 1], -np.inf))
        follows = np.zeros(len(look), dtype=bool)
        follows[1:] = seen[1:] & ~news[1:] & (look[1:] - look[:-1] <= 1)
        head = np.maximum.accumulate(np.where(follows, 0, np.arange(len(look))))
        heard = np.empty(len(look))
        heard[order] = np.where(news[head], latest, planned[order])
        return np.minimum(heard, planned)


def _union(begins: Array, ends: Array) -> Intervals:
    order = np.argsort(begins, kind="stable")
    begins, until = begins[order], np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], begins[1:] > until[:-1]])
    return Intervals(begins[new], until[np.concatenate([new[1:], [True]])])
