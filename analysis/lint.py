"""What a run's figures cannot say: too few requests, a queue that grows, a tail without arrivals, and the like.

Each check looks at the trace, says in a line what is wrong and what to do, and names the figures that it touches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped]

from analysis.files import write_json
from analysis.intervals import Statistic, interval, mean, quantile
from analysis.metrics import latencies
from analysis.tokens import Array
from playground import trace

LATENCIES = ("ttft", "tpot", "e2el")
NEEDED = {50: 20, 90: 100, 99: 1000}
"""Requests of which ten lie beyond a percentile."""
DRAIN = 0.10
"""Share of a run after the last arrival that may go into a rate."""
AT_ONCE = 0.01
"""Of a run: arrivals within this share of it all came at once."""
GROWTH = 0.5
"""Of the mean time in the system: waits that grow by so much over a run are of a queue that grows."""
WARM_UP = 0.05
"""By which the first requests may change a mean."""
LEAST = 100
"""Requests that a trend or a warm-up can be told from."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` names the check, `touches` the figures that it makes doubtful. `note`: nothing is wrong, but be aware."""

    code: str
    touches: str
    text: str
    advice: str
    note: bool = False

    def __str__(self) -> str:
        return f"{self.code}, touches {self.touches}: {self.text}"


@dataclass(frozen=True)
class Run:
    """What the checks look at. `ended`: by arrival, with ttft, tpot and e2el in seconds; `arrivals`: of all."""

    folder: Path
    ended: pd.DataFrame
    arrivals: pd.DataFrame
    config: Mapping[str, Any]

    @property
    def served(self) -> pd.DataFrame:
        return self.ended[self.ended["outcome"] == "finished"]

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last end."""
        return float(self.ended["finished"].max() - self.arrivals["arrival"].min()) if len(self.ended) else 0.0

    @property
    def arriving(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrivals["arrival"].max() - self.arrivals["arrival"].min()) if len(self.arrivals) else 0.0


def read(folder: Path) -> Run:
    """`FileNotFoundError`, in a line, if it is no run's folder."""
    ended = latencies(trace.read(folder, "requests").to_pandas()).sort_values(["arrival", "id"], ignore_index=True)
    columns = ["id", "arrival", "prompt_length", "max_tokens", "hash_block", "hashes"]
    arrivals = trace.read(folder, "arrivals", columns).to_pandas()
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return Run(folder, ended, arrivals, config)


def lint(run: Run) -> list[Finding]:
    """In the order of `CHECKS`."""
    if not len(run.arrivals):
        return [Finding("empty", "everything", "no request arrived", "look at the workload")]
    return [finding for check in CHECKS for finding in check(run)]


def unended(run: Run) -> list[Finding]:
    left = len(run.arrivals) - len(run.ended)
    if not left:
        return []
    text = f"{left:,} of {len(run.arrivals):,} requests had not ended: they are the ones that took longest"
    return [Finding("unended", "all latencies", text, "let the run end, or say that figures are of those that did")]


def turned_away(run: Run) -> list[Finding]:
    counts = run.ended["outcome"].value_counts()
    gone = {name: int(counts.get(name, 0)) for name in ("rejected", "aborted")}
    told = " and ".join(f"{count:,} {name}" for name, count in gone.items() if count)
    if not told:
        return []
    text = f"{told} of {len(run.ended):,}: latencies are of those that were served"
    return [Finding("turned_away", "all latencies", text, "compare runs by goodput, or by equal shares served")]


def few(run: Run) -> list[Finding]:
    count = len(run.served)
    short = {q: needed for q, needed in NEEDED.items() if count < needed}
    if not short:
        return []
    q, needed = min(short.items())
    names = ", ".join(f"P{one}" for one in short)
    text = f"{count:,} requests finished; P{q} needs {needed:,} for ten beyond it"
    return [Finding("few", names, text, f"leave {names} out, or serve more requests")]


def at_once(run: Run) -> list[Finding]:
    if len(run.arrivals) < 2 or run.arriving > AT_ONCE * run.duration:
        return []
    text = "all requests came at once: TTFT is the place in the queue, and E2EL the length of the run"
    return [Finding("at_once", "TTFT, E2EL", text, "take throughput from it, or let requests arrive at a rate")]


def drain(run: Run) -> list[Finding]:
    """Of runs whose requests arrive one after another: the end, in which the batch runs empty, is no steady state."""
    if at_once(run) or not len(run.served) or closed(run):
        return []
    last = float(run.arrivals["arrival"].max())
    tail = float(run.ended["finished"].max()) - last
    if tail <= DRAIN * run.duration:
        return []
    before = int((run.served["finished"] <= last).sum())
    rate = before / run.arriving if run.arriving else 0.0
    text = (
        f"{tail:.3g} s of {run.duration:.3g} s ({tail / run.duration:.0%}) come after the last arrival: the rate "
        f"counts them, and was {rate:.3g} requests/s until then"
    )
    return [Finding("drain", "throughput", text, "serve more requests, or count until the last arrival")]


def saturated(run: Run) -> list[Finding]:
    """Waits that grow over the run, with their interval above none."""
    served = run.served
    if at_once(run) or closed(run) or len(served) < LEAST:
        return []
    waits = (served["first_token"] - served["arrival"]).to_numpy()
    times = served["arrival"].to_numpy()
    span = times[-1] - times[0]
    growth = float(_slope(np.stack([times, waits], axis=1)[None])[0] * span)
    whole = float(served["e2el"].mean())
    if growth <= GROWTH * whole or interval(np.stack([times, waits], axis=1), _slope)[0] <= 0:
        return []
    text = (
        f"times to the first token grow by {growth:.3g} s over the run, beside {whole:.3g} s in the system on average: "
        "requests come faster than they are served, and latencies measure how long that went on"
    )
    return [Finding("saturated", "all latencies", text, "lower the rate, or take throughput from it only")]


def _slope(samples: Array) -> Array:
    """Least squares, of samples [draws, n, (time, value)]."""
    times, values = samples[..., 0], samples[..., 1]
    times = times - times.mean(axis=1, keepdims=True)
    spread = (times**2).sum(axis=1)
    found: Array = np.divide((times * values).sum(axis=1), spread, out=np.zeros(len(spread)), where=spread > 0)
    return found


def closed(run: Run) -> list[Finding]:
    workload = run.config.get("workload", {})
    if "ClosedLoop" not in str(workload.get("_target_", "")):
        return []
    text = (
        "the clients of a closed loop send nothing while they wait: slow stretches are seen by few requests "
        "(coordinated omission), and the rate is a result, not a load"
    )
    return [Finding("closed", "tails, load", text, "take an open loop (workload=poisson) for latency at a load")]


def hits(run: Run) -> list[Finding]:
    """Cached tokens beside those that the workload shares at all."""
    cached = int(run.ended["cached_tokens"].sum())
    shared = _shared_tokens(run.arrivals)
    if cached > shared:
        text = f"{cached:,} tokens count as prefix hits, and prompts share {shared:,}: some are of recomputed prompts"
        return [Finding("hits", "prefix_hit_rate", text, "count first admissions only")]
    if shared == 0 and run.config.get("kv", {}).get("prefix_cache") and len(run.arrivals) > 1:
        text = "no prompt begins as an earlier one: a hit rate of 0 says nothing of the cache or of a router"
        return [Finding("no_sharing", "prefix_hit_rate", text, "take a workload with prefixes to compare either", True)]
    return []


def _shared_tokens(arrivals: pd.DataFrame) -> int:
    """Tokens of prompts whose prefix an earlier prompt had: what an endless cache could give."""
    seen: set[int] = set()
    total = 0
    for ids, block in zip(arrivals["hashes"], arrivals["hash_block"], strict=True):
        for id in ids if ids is not None else ():
            if id in seen:
                total += int(block)
            else:
                seen.add(id)
    return total


def warm_up(run: Run) -> list[Finding]:
    """Requests at the beginning that are unlike the rest, by MSER-5.

    Source: White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997.
    """
    if at_once(run) or saturated(run):
        return []
    for name in ("ttft", "tpot"):  # not E2EL, which depends on how long answers happen to be
        values = run.served[name].dropna().to_numpy()
        if len(values) < LEAST or not (dropped := 5 * _truncation(_fives(values))):
            continue
        whole, rest = float(values.mean()), float(values[dropped:].mean())
        if abs(rest / whole - 1) > WARM_UP and _apart(interval(values[:dropped]), interval(values[dropped:])):
            text = (
                f"the first {dropped:,} of {len(values):,} requests met another system: without them {name.upper()} is "
                f"{rest * 1e3:.4g} ms on average, with them {whole * 1e3:.4g} ms"
            )
            return [Finding("warm_up", "all latencies", text, "leave them out, or serve more requests")]
    return []


def _fives(values: Array) -> Array:
    """Means of five neighbours each."""
    found: Array = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    return found


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def _truncation(means: Array) -> int:
    """How many of a series' first values to leave out: the marginal standard error of the rest is least. At most half;
    beyond that it tells a trend, not a warm-up, and nothing is left out."""
    count = len(means)
    best = min(range(count - 4), key=lambda begin: means[begin:].var() / (count - begin), default=0)
    return best if best <= count // 2 else 0


CHECKS: tuple[Callable[[Run], list[Finding]], ...] = (
    unended, turned_away, few, at_once, drain, saturated, closed, hits, warm_up,
)  # fmt: skip


# --- intervals


STATISTICS: Mapping[str, Statistic] = {"mean": mean} | {f"p{q}": quantile(q) for q in NEEDED}


def intervals(run: Run, statistics: Collection[str] = tuple(STATISTICS)) -> list[dict[str, Any]]:
    """Mean, P50, P90 and P99 of each latency in seconds, with 95 % intervals; percentiles only of enough requests."""
    rows = []
    for name in LATENCIES:
        values = run.served[name].dropna().to_numpy()
        if len(values) < 2:
            continue
        short = {f"p{q}" for q, needed in NEEDED.items() if len(values) < needed}
        for statistic, of in STATISTICS.items():
            if statistic in short or statistic not in statistics:
                continue
            low, high = interval(values, of)
            value = float(of(values[None])[0])
            rows.append({"metric": name, "statistic": statistic, "value": value, "low": low, "high": high})
    return rows


# --- the command

HELP = """\
What a run's figures cannot say, and how sure the others are: percentiles of too few requests, a rate that counts the
drain, a queue that grows (saturation), closed loops (coordinated omission), hit rates without sharing, a warm-up that
is counted, requests that never ended. Intervals are of 95 %, by a bootstrap over blocks of neighbouring requests.

Exit code: 0 nothing but notes, 1 something found, 2 no run.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "lint",
        help="what a run's figures cannot say",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the same as JSON")
    parser.set_defaults(do=_do)


def _do(given: argparse.Namespace) -> int:
    told, clean = [], True
    for folder in given.runs:
        run = read(folder)
        findings, rows = lint(run), intervals(run)
        clean = clean and all(finding.note for finding in findings)
        print(f"{folder}: {len(run.ended):,} requests ended, {run.duration:.4g} s")
        for finding in findings:
            print(f"  {'note: ' if finding.note else ''}{finding}\n    {finding.advice}")
        if not findings:
            print("  nothing found")
        for row in rows:
            print(
                f"  {row['metric'].upper():5} {row['statistic']:5} {row['value'] * 1e3:12,.2f} ms  "
                f"[{row['low'] * 1e3:,.2f}, {row['high'] * 1e3:,.2f}]"
            )
        told.append({"run": str(folder), "findings": [asdict(one) for one in findings], "intervals": rows})
    if given.out:
        write_json(given.out, told)
    return 0 if clean else 1
