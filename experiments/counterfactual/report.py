"""What another policy would have changed, beside what the model does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.intervals import interval
from analysis.metrics import latencies
from playground.trace import read

METRICS = ("ttft", "tpot", "e2el")
SHOWN = ((50, "P50"), (90, "P90"))
MOVED = 5
"""Requests that are named as winners and as losers."""


@dataclass(frozen=True, slots=True)
class Change:
    """One metric over the requests that the branch can have touched, in seconds.

    `real` is recorded, `same` the recorded policy and `other` the other one, both simulated from the branch on.
    `mean`: of the paired differences other - same, with its 95 % interval.
    """

    metric: str
    statistic: str
    requests: int
    real: float
    same: float
    other: float

    @property
    def effect(self) -> float:
        """Of the other policy, as a share: simulation against simulation."""
        return self.other / self.same - 1 if self.same else nan

    @property
    def error(self) -> float:
        """Of the model on this stretch, as a share."""
        return self.same / self.real - 1 if self.real else nan

    @property
    def verdict(self) -> str:
        """Whether the effect stands out from what the model gets wrong."""
        sides = self.real, self.same, self.other
        if isnan(sum(sides)) or min(sides) <= 0:
            return "-"
        # As ratios: a model that is 200 times too fast is off by far more than -99.5 % would make believe.
        if abs(log(self.other / self.same)) <= abs(log(self.same / self.real)):
            return "within the model's error"
        return "better" if self.effect < 0 else "worse"


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean difference other - same of one metric over requests, seconds, and its 95 % interval."""

    metric: str
    requests: int
    mean: float
    low: float
    high: float


def touched(real: Path, same: Path, other: Path, instant: float) -> pd.DataFrame:
    """Requests that had not ended at the branch, finished in all three runs, in order of arrival.

    Columns `METRIC_real`, `METRIC_same`, `METRIC_other` in seconds; TTFT is NaN where the first token came before.
    """
    frames = []
    for name, folder in (("real", real), ("same", same), ("other", other)):
        rows = read(folder, "requests").to_pandas()
        rows = latencies(rows[(rows["outcome"] == "finished") & (rows["finished"] > instant)])
        rows.loc[rows["first_token"] <= instant, "ttft"] = np.nan
        kept = rows.set_index("id")[["arrival", *METRICS, "preemptions"]]
        frames.append(kept.rename(columns=lambda column, name=name: f"{column}_{name}"))
    return pd.concat(frames, axis=1, join="inner").sort_values(["arrival_real"]).reset_index()


def changes(requests: pd.DataFrame) -> list[Change]:
    found = []
    for metric in METRICS:
        columns = [f"{metric}_{side}" for side in ("real", "same", "other")]
        known = requests[columns].dropna()
        if known.empty:
            continue
        for q, name in SHOWN:
            values = [float(np.percentile(known[column], q)) for column in columns]
            found.append(Change(metric, name, len(known), *values))
        found.append(Change(metric, "mean", len(known), *[float(known[column].mean()) for column in columns]))
    return found


def paired(requests: pd.DataFrame) -> list[Paired]:
    found = []
    for metric in METRICS:
        known = (requests[f"{metric}_other"] - requests[f"{metric}_same"]).dropna().to_numpy()
        if len(known):
            found.append(Paired(metric, len(known), float(known.mean()), *interval(known)))
    return found


def spans(folders: Mapping[str, Path], instant: float) -> dict[str, dict[str, float]]:
    """Of each run from the branch on: seconds until its last end, tokens a second, preemptions."""
    found = {}
    for name, folder in folders.items():
        steps = read(
            folder, "steps", ["planned", "finished", "prefill_tokens", "decode_tokens", "preempted"]
        ).to_pandas()
        after = steps[steps["planned"] > instant]
        seconds = float(steps["finished"].max() - instant)
        tokens = float((after["prefill_tokens"] + after["decode_tokens"]).sum())
        found[name] = {
            "seconds": seconds,
            "tokens_per_s": tokens / seconds if seconds > 0 else nan,
            "steps": float(len(after)),
            "preemptions": float(after["preempted"].sum()),
        }
    return found


def told(about: Mapping[str, Any], found: Sequence[Change], pairs: Sequence[Paired], requests: pd.DataFrame) -> str:
    """For a terminal."""
    lines = [
        f"{about['requests']:,} requests were under way or still to come at step {about['from_step']:,} "
        f"({about['instant']:.3f} s)",
        "",
        f"{'':12} {'recorded':>10} {'simulated':>10} {'other':>10} {'change':>8} {'model off':>10}",
    ]
    lines += [
        f"{one.metric.upper():5} {one.statistic:6} {_ms(one.real):>10} {_ms(one.same):>10} {_ms(one.other):>10} "
        f"{one.effect:>+8.1%} {one.error:>+10.1%}  {one.verdict}"
        for one in found
    ]
    lines.append("")
    for name, label in (("seconds", "until the last end (s)"), ("preemptions", "preemptions")):
        values = [about["spans"][side][name] for side in ("real", "same", "other")]
        lines.append(
            f"{label:24}" + "  ".join(f"{side} {value:.6g}" for side, value in zip(SIDES, values, strict=True))
        )
    lines += [
        f"{pair.metric.upper()} of the same request, other - simulated: {pair.mean * 1e3:+.1f} ms on average "
        f"[{pair.low * 1e3:+.1f}, {pair.high * 1e3:+.1f}] (95 %, {pair.requests:,} requests)"
        for pair in pairs
    ]
    lines += ["", *_moved(requests)]
    return "\n".join(lines)


SIDES = ("recorded", "simulated", "other")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _moved(requests: pd.DataFrame) -> list[str]:
    if requests.empty:
        return []
    change = (requests["e2el_other"] - requests["e2el_same"]).rename("change")
    rows = requests.assign(change=change).sort_values("change")
    lines = []
    for title, part in (("most gained", rows.head(MOVED)), ("most lost", rows.tail(MOVED)[::-1])):
        named = [
            f"{int(row.id)} ({row.change * 1e3:+.0f} ms)"
            for row in part.itertuples()
            if (row.change < 0) == (title == "most gained") and row.change
        ]
        lines.append(f"{title} (E2EL): {', '.join(named) or 'nobody'}")
    return lines
