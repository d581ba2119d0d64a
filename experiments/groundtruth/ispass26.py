"""LLMServingSim 2.0's references: vLLM on H100 and A6000, mean latencies and generated tokens second by second."""

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

SOURCE = "llmservingsim-ispass26"
NAME = "vLLM 2025"
H100, A6000 = Hardware("llama-3.1-70b", "h100", 4, eager=True), Hardware("llama-3.1-8b", "a6000", 1, eager=True)
ENGINE = Engine("vllm", max_seqs=128, max_tokens=2048)
"""As the logs of the A6000 runs say (so too: eager); those of the H100 runs were not published."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`means`, `series`: files that hold the measured row and the throughput by second; None where there is none."""

    what: str
    hardware: Hardware
    replicas: int
    prefix_cache: bool
    means: str | None
    series: str | None


REFERENCES = (
    Reference("one instance", H100, 1, False, "figure_8/SD_latency.tsv", None),
    Reference("two instances", H100, 2, False, "figure_8/MD_latency.tsv", "figure_5/H100/MD_throughput.tsv"),
    Reference("one instance, prefix cache", H100, 1, True, None, "figure_5/H100/SD+PC_throughput.tsv"),
    Reference("two instances", A6000, 2, False, None, "figure_5/A6000/MD_throughput.tsv"),
    Reference("one instance, prefix cache", A6000, 1, True, None, "figure_5/A6000/SD+PC_throughput.tsv"),
)


def cases() -> list[Case]:
    return [_case(reference) for reference in REFERENCES]


def skipped() -> list[Skipped]:
    return [
        Skipped(SOURCE, "prefill and decode on instances of their own", 2, "not modelled"),
        Skipped(SOURCE, "Mixtral-8x7B, Phi-mini-MoE", 2, "mixture of experts: its routing was not recorded"),
        Skipped(SOURCE, "figure 6: power; figure 7: memory of a GPU", 4, "not modelled"),
        Skipped(SOURCE, "figure 9: TPU v6e", 1, "no data sheet of a TPU here"),
    ]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trial that also compares tokens by second: the mean distance of both curves over the mean measured."""

    serving: Serving
    series: tuple[float, ...]

    def predict(self, cost: str, calibration: Calibration) -> Metrics:
        run = self.serving.run(cost, calibration.get(self.serving.name, Unknowns()))
        metrics = run.means()
        if self.series:
            metrics["curve_makespan"] = run.makespan
            measured = np.array(self.series)
            predicted = run.tokens_by_second(len(measured))
            metrics["throughput_distance"] = float(np.abs(predicted - measured).mean() / measured.mean())
        return metrics

    def floor(self) -> Metrics:
        return self.serving.floor()


def _case(reference: Reference) -> Case:
    hardware = reference.hardware
    serving = Serving(
        hardware,
        ENGINE,
        NAME,
        OpenLoad(_requests()),
        replicas=reference.replicas,
        prefix_cache=reference.prefix_cache,
    )
    series = _series(reference.series)
    return Case(
        source=SOURCE,
        name=f"300 ShareGPT at 10/s, {reference.what}",
        split="test",
        engine=NAME,
        model=hardware.model,
        device=hardware.device,
        tp=hardware.tp,
        load="below saturation",
        measured=_means(reference.means) | _ends(series),
        trial=Trajectory(serving, series),
        assumed="eager, 128 sequences and 2048 tokens a step, as on the A6000" if hardware is H100 else "",
    )


def _requests() -> tuple[Request, ...]:
    rows = data.lines("ispass26/sharegpt_req300_rate10_llama.lengths.jsonl.xz")
    return tuple(
        Request(
            number,
            row["arrival_s"],
            row["prompt_tokens"],
            row["output_tokens"],
            row["output_tokens"],
            hashes=tuple(row["prefix_block_ids"]),
        )
        for number, row in enumerate(rows)
    )


def _means(file: str | None) -> dict[str, float]:
    if file is None:
        return {}
    row = next(row for row in data.table(f"ispass26/{file}") if row["framework"] == "vLLM")
    return {
        "throughput": float(row["throughput_tok_s"]),
        "ttft": float(row["mean_ttft_ms"]) / 1e3,
        "tpot": float(row["mean_tpot_ms"]) / 1e3,
    }


def _series(file: str | None) -> tuple[float, ...]:
    """Row t holds the tokens of the second that ends at t."""
    return tuple(float(row["throughput"]) for row in data.table(f"ispass26/{file}")[1:]) if file else ()


def _ends(series: tuple[float, ...]) -> dict[str, float]:
    """The last second in which tokens came: to a second, the makespan."""
    busy = [second for second, tokens in enumerate(series, start=1) if tokens]
    return {"curve_makespan": float(busy[-1])} if busy else {}
