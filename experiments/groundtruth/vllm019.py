"""vLLM 0.19 serving 300 ShareGPT requests, recorded by LLMServingSim with a time stamp for every request.

Engine-level: `queued_ts` counts as arrival, for between client and engine lie up to 0.37 s of tokenizer and IPC.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.groundtruth import data
from experiments.groundtruth.calibration import Calibration, Unknowns
from experiments.groundtruth.case import Case, Metrics, Skipped
from experiments.groundtruth.costs import Hardware
from experiments.groundtruth.engines import Engine
from experiments.groundtruth.serving import OpenLoad, Serving
from playground.core import Request
from playground.workload.shipped import find

SOURCE = "llmservingsim-vllm019"
NAME = "vLLM 0.19.0"


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run: its folder, its workload among the shipped traces, its server."""

    folder: str
    workload: str
    hardware: Hardware
    max_seqs: int
    blocks: int | None
    """As vLLM reported them; None where they were not recorded."""


RUNS = (
    Run("RTX4090_Llama-3.1-8B", "sharegpt_timed_llama", Hardware("llama-3.1-8b", "rtx4090"), 256, 2588),
    Run("RTXPRO6000_Qwen3-32B", "sharegpt_timed_qwen", Hardware("qwen3-32b", "rtxpro6000", tp=2), 128, None),
)
MAX_TOKENS = 2048


def cases() -> list[Case]:
    return [_case(run) for run in RUNS]


def skipped() -> list[Skipped]:
    return []


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trial that also compares how running and waiting went over time, as mean distance over the mean that ran."""

    serving: Serving
    times: tuple[float, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        run = self.serving.run(cost, calibration.get(self.serving.name, Unknowns()))
        running, waiting = run.queues_at(np.array(self.times))
        scale = np.mean(self.running)
        return {
            **run.means(),
            "p50_ttft": float(np.percentile(run.ttft, 50)),
            "p90_ttft": float(np.percentile(run.ttft, 90)),
            "p99_ttft": float(np.percentile(run.ttft, 99)),
            "p99_tpot": float(np.nanpercentile(run.tpot, 99)),
            "preemptions": float(run.preemptions),
            "running_distance": float(np.abs(running - self.running).mean() / scale),
            "waiting_distance": float(np.abs(waiting - self.waiting).mean() / scale),
        }

    def floor(self) -> Metrics:
        return self.serving.floor()


def _case(run: Run) -> Case:
    rows = data.lines(f"vllm019/{run.folder}/requests.jsonl.xz")
    seconds = data.table(f"vllm019/{run.folder}/timeseries.csv.xz")
    engine = Engine("vllm", run_ahead=2, max_seqs=run.max_seqs, max_tokens=MAX_TOKENS)
    serving = Serving(run.hardware, engine, NAME, OpenLoad(_requests(run, rows)), run.blocks)
    return Case(
        source=SOURCE,
        name=f"300 ShareGPT at 10/s, {run.folder}",
        split="test",
        engine=NAME,
        model=run.hardware.model,
        device=run.hardware.device,
        tp=run.hardware.tp,
        load="saturated",  # the queue grows for as long as requests arrive
        measured=_measured(rows),
        trial=Recorded(
            serving,
            tuple(float(row["t"]) for row in seconds),
            tuple(int(row["running"]) for row in seconds),
            tuple(int(row["waiting"]) for row in seconds),
        ),
        assumed="" if run.blocks else "KV blocks, which were not recorded",
    )


def _requests(run: Run, rows: list[dict[str, float]]) -> tuple[Request, ...]:
    """In order of queueing, with the prefix ids of the workload's line that each came from."""
    hashes = [row.hashes for row in find("workload", run.workload, None).rows()]
    began = min(row["queued_ts"] for row in rows)
    numbers = [int(str(row["request_id"]).removeprefix("bench-")) for row in rows]
    queued = sorted(zip(rows, numbers, strict=True), key=lambda pair: (pair[0]["queued_ts"], pair[1]))
    return tuple(
        Request(
            place,
            row["queued_ts"] - began,
            int(row["input_toks"]),
            int(row["output_toks"]),
            int(row["output_toks"]),
            hashes=hashes[number],
        )
        for place, (row, number) in enumerate(queued)
    )


def _measured(rows: list[dict[str, float]]) -> Metrics:
    names = ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    queued, first, last, out = (np.array([row[name] for row in rows]) for name in names)
    ttft, tpot, makespan = first - queued, (last - first) / (out - 1), float(last.max() - queued.min())
    return {
        "ttft": float(ttft.mean()),
        "tpot": float(tpot.mean()),
        "e2el": float((last - queued).mean()),
        "makespan": makespan,
        "throughput": float(out.sum() / makespan),
        "p50_ttft": float(np.percentile(ttft, 50)),
        "p90_ttft": float(np.percentile(ttft, 90)),
        "p99_ttft": float(np.percentile(ttft, 99)),
        "p99_tpot": float(np.percentile(tpot, 99)),
    }
