"""A run folder's numbers, under the names and by the definitions of vLLM's serving benchmark.

Reads tables; knows neither how they were made nor which policy made them. Times are seconds in, milliseconds in
the keys that end in `_ms`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.bubbles import idle_causes, shares
from analysis.objectives import Objectives
from analysis.occupancy import busy_time, covered, kv_metrics, step_metrics
from analysis.repetitions import apart
from analysis.tokens import Array, gaps, token_times
from playground import trace

Summary = dict[str, Any]

STEP_COLUMNS = (
    "step", "group", "lane", "planned", "launched", "started", "finished", "host", "prefill_tokens", "decode_tokens",
    "blocks_free", "count", "ticks", "stage_started", "stage_finished", "decided",
)  # fmt: skip
SLICE_COLUMNS = ("step", "sequence", "start", "length", "samples", "lane")


NO_OBJECTIVES = Objectives()


@dataclass(frozen=True)
class Tables:
    """What a summary is made of; `blocks` is the size of the KV pools of one group of ranks, `block_size` in tokens."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    slices: pd.DataFrame
    blocks: int
    looks: pd.DataFrame
    block_size: int = 16

    @cached_property
    def repetitions(self) -> pd.DataFrame:
        """`steps` with merged ones taken apart: what merging saved must not change a number."""
        return apart(self.steps, self.slices, self.block_size)

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """When each token came back to its client (`analysis.tokens.token_times`)."""
        return token_times(self.requests, self.steps, self.slices)

    @property
    def idle_causes(self) -> pd.DataFrame:
        """Why which stage was idle for how long."""
        return idle_causes(self.requests, self.steps, self.repetitions, self.looks)


def load(run_dir: Path) -> Tables:
    requests = trace.read(run_dir, "requests").to_pandas()
    steps = trace.read(run_dir, "steps", list(STEP_COLUMNS)).to_pandas()
    slices = trace.read(run_dir, "slices", list(SLICE_COLUMNS)).to_pandas()
    looks = trace.read(run_dir, "looks").to_pandas()
    return Tables(requests, steps, slices, group_blocks(run_dir), looks, _spec(run_dir)["block_size"])


def group_blocks(run_dir: Path) -> int:
    """KV blocks of one group of ranks: of all ranks in lockstep, else of the one."""
    spec = _spec(run_dir)
    return int(spec["blocks"] * (spec["ranks"] if spec["lockstep"] else 1))


def _spec(run_dir: Path) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["spec"]
    return spec


def summarize(
    tables: Tables, objectives: Objectives = NO_OBJECTIVES, percentiles: Sequence[float] = (50, 90, 99)
) -> Summary:
    """All metrics of one run. A metric that has no sample is None."""
    finished = latencies(tables.requests[tables.requests["outcome"] == "finished"])
    tokens = tables.tokens
    samples = {
        "ttft": finished["ttft"].to_numpy(),
        "tpot": finished["tpot"].dropna().to_numpy(),
        "itl": gaps(tokens[tokens["sequence"].isin(finished["id"])]),
        "e2el": finished["e2el"].to_numpy(),
    }
    duration = _duration(tables)
    summary = _counts(tables.requests) | _throughput(finished, tokens, duration)
    for name, values in samples.items():
        summary |= describe(name, values, percentiles)
    summary |= _goodness(tables.requests, finished, duration, objectives)
    summary |= _memory(tables.requests)
    summary |= step_metrics(tables.steps) | kv_metrics(tables.repetitions, tables.blocks)
    summary["bubble_ratio"] = bubble_ratio(tables.requests, tables.repetitions)
    summary |= _bubbles(tables)
    summary["notes"] = _notes(samples, percentiles)
    return summary


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """With columns ttft, tpot (NaN where there is but one token) and e2el, in seconds."""
    later = (requests["output_length"] - 1).where(requests["output_length"] > 1)
    return requests.assign(
        ttft=requests["first_token"] - requests["arrival"],
        tpot=(requests["finished"] - requests["first_token"]) / later,
        e2el=requests["finished"] - requests["arrival"],
    )


def describe(name: str, seconds: Array, percentiles: Sequence[float] = (50, 90, 99)) -> Summary:
    """Mean, median, standard deviation and percentiles in milliseconds."""
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{q:g}" for q in percentiles))]
    if len(seconds) == 0:
        return dict.fromkeys(keys)
    values = [seconds.mean(), np.median(seconds), seconds.std(), *(percentile(seconds, q) for q in percentiles)]
    return {key: float(value) * 1e3 for key, value in zip(keys, values, strict=True)}


def percentile(values: Array, q: float) -> float:
    """Linear, as numpy's; refused beyond p99 where fewer than ten values would lie above it."""
    if q > 99 and len(values) < _needed(q):
        raise ValueError(f"p{q:g} needs at least {_needed(q):,} samples, there are {len(values):,}: ask for p99")
    return float(np.percentile(values, q))


def bubble_ratio(requests: pd.DataFrame, steps: pd.DataFrame) -> float | None:
    """Share of the stages' time that was idle while at least one request was in the system."""
    served = requests[requests["outcome"] != "rejected"]
    groups = sorted(steps["group"].unique())
    active = busy = 0.0
    for group in groups:
        mine = served if len(groups) == 1 else served[served["rank"] == group]
        stages, time = busy_time(steps[steps["group"] == group])
        busy += time
        active += stages * covered(mine["arrival"].to_numpy(), mine["finished"].to_numpy())
    return max(0.0, 1 - busy / active) if active else None


def _bubbles(tables: Tables) -> Summary:
    """Of a pipeline, what the bubble ratio is made of."""
    if not tables.repetitions["stage_started"].notna().any():
        return {}
    return {f"bubble_{cause}": share for cause, share in shares(tables.idle_causes).items()}


def max_concurrent(started: Array, finished: Array) -> int:
    """The most half-open intervals [started, finished) that share an instant."""
    if len(started) == 0:
        return 0
    times = np.concatenate([finished, started])
    change = np.concatenate([-np.ones(len(finished)), np.ones(len(started))])
    # Stable: at equal times the ends, listed first, count before the starts.
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def _duration(tables: Tables) -> float:
    """Seconds from the first arrival to the last answer."""
    if len(tables.requests) == 0:
        return 0.0
    return float(tables.requests["finished"].max() - tables.requests["arrival"].min())


def _counts(requests: pd.DataFrame) -> Summary:
    outcomes = requests["outcome"].value_counts()
    names = {"completed": "finished", "rejected": "rejected", "aborted": "aborted"}
    return {"requests": len(requests)} | {key: int(outcomes.get(value, 0)) for key, value in names.items()}


def _throughput(finished: pd.DataFrame, tokens: pd.DataFrame, duration: float) -> Summary:
    inputs, outputs = int(finished["prompt_length"].sum()), int(finished["output_length"].sum())
    return {
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _per(len(finished), duration),
        "output_throughput": _per(outputs, duration),
        "total_token_throughput": _per(inputs + outputs, duration),
        "max_output_tokens_per_s": _fullest_second(tokens["time"].to_numpy()),
        "concurrency": _per(float(finished["e2el"].sum()), duration),
        "max_concurrent_requests": max_concurrent(finished["arrival"].to_numpy(), finished["finished"].to_numpy()),
    }


def _fullest_second(times: Array) -> int:
    # Not a bincount: a slow trickle of requests spans more seconds than there is memory.
    return int(np.unique(np.floor(times), return_counts=True)[1].max()) if len(times) else 0


def _goodness(requests: pd.DataFrame, finished: pd.DataFrame, duration: float, objectives: Objectives) -> Summary:
    """Goodput and attainment; None without objectives. A request that got no answer has missed every one."""
    met = {name: finished[name].fillna(0.0) <= limit for name, limit in _limits(finished, objectives).items()}
    if not met:
        return {"request_goodput": None, "slo_attainment": None}
    good = int(np.logical_and.reduce(list(met.values())).sum())
    by_metric = {f"slo_attainment_{name}": _per(int(hits.sum()), len(requests)) for name, hits in met.items()}
    return {"request_goodput": _per(good, duration), "slo_attainment": _per(good, len(requests))} | by_metric


def _limits(finished: pd.DataFrame, objectives: Objectives) -> dict[str, pd.Series]:
    """What holds for each request, by metric: its own objective, else the run's; none where nobody has one."""
    defaults = {"ttft": objectives.ttft, "tpot": objectives.tpot, "e2el": objectives.e2el}
    limits = {
        name: finished[f"{name}_slo"].where(finished[f"{name}_slo"] < inf, default)
        for name, default in defaults.items()
    }
    return {name: limit for name, limit in limits.items() if (limit < inf).any()}


def _memory(requests: pd.DataFrame) -> Summary:
    started = requests[requests["admitted"].notna()]
    return {
        "preemptions": int(requests["preemptions"].sum()),
        "wasted_tokens": int(requests["recomputed_tokens"].sum()),
        "prefix_hit_rate": _per(int(started["cached_tokens"].sum()), int(started["prompt_length"].sum())),
    }


def _notes(samples: Mapping[str, Array], percentiles: Sequence[float]) -> list[str]:
    """Where a percentile rests on fewer than ten values beyond it."""
    return [
        f"p{q:g}_{name}_ms rests on {len(values):,} samples; {_needed(q):,} would be better"
        for q in percentiles
        for name, values in samples.items()
        if 0 < len(values) < _needed(q)
    ]


def _needed(q: float) -> int:
    """Samples of which ten lie beyond the q-th percentile."""
    return round(1000 / (100 - q)) if q < 100 else 1


def _per(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None
