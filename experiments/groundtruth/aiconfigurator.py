"""NVIDIA AIConfigurator's measured points: closed loops of equal requests on H100 and H200; mean TTFT and TPOT only.

The servers' flags, the requests sent per user and any jitter of lengths are not in the file: defaults are assumed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from experiments.groundtruth import data
from experiments.groundtruth.case import Case, Skipped
from experiments.groundtruth.costs import Hardware
from experiments.groundtruth.engines import Engine
from experiments.groundtruth.serving import ClosedLoad, Serving
from playground.core import Request

SOURCE = "aiconfigurator"
Row = dict[str, str]

MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}
"""Shapes that the rows' models have, in bf16."""
DEVICES = {"h100_sxm": "h100", "h200_sxm": "h200"}
ENGINES = {
    "vllm": Engine("vllm"),
    "sglang": Engine("sglang"),
    "trtllm": Engine("trtllm", max_seqs=2048),
}
"""SGLang and TensorRT-LLM overlap host and device by default. Here their host time is what they fail to hide: what a
step lasts is the same, and quiet stretches can be skipped."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def cases() -> list[Case]:
    return [_case(row) for row in _rows() if not _obstacle(row)]


def skipped() -> list[Skipped]:
    told = Counter((row["model_path"], why) for row in _rows() if (why := _obstacle(row)))
    return [Skipped(SOURCE, model, count, why) for (model, why), count in told.items()]


def _rows() -> list[Row]:
    return data.table("aiconfigurator/hopper_e2e.csv.xz")


def _obstacle(row: Row) -> str:
    """Why a row cannot be replayed; empty if it can."""
    if row["gemm_quant_mode"]:
        return f"{row['gemm_quant_mode']} weights are not costed here"
    if row["model_path"] not in MODELS:
        return "no shape of this model ships"
    if float(row["pp_size"] or 1) > 1 or float(row["attention_dp_size"] or 1) > 1:
        return "pipelines and DP attention are not in this replay"
    return ""


@dataclass(frozen=True, slots=True)
class _Point:
    users: int
    prompt: int
    output: int


def _case(row: Row) -> Case:
    point = _Point(int(float(row["concurrency"])), int(row["isl"]), int(row["osl"]))
    hardware = Hardware(MODELS[row["model_path"]], DEVICES[row["system"]], int(float(row["tp_size"])))
    name = f"{NAMES[row['backend']]} {row['backend_version']}"
    load = ClosedLoad(point.users, point.prompt, point.output)
    # Random prompts share nothing.
    serving = Serving(hardware, ENGINES[row["backend"]], name, load, prefix_cache=False)
    ttft, tpot = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
    return Case(
        source=SOURCE,
        name=f"{point.prompt}/{point.output} tokens, {point.users} users",
        split="fit" if row["split"] == "fit" else "test",
        engine=name,
        model=hardware.model,
        device=hardware.device,
        tp=hardware.tp,
        load="saturated" if serving.saturated(_all_at_once(point)) else "below saturation",
        measured={"ttft": ttft, "tpot": tpot, "e2el": ttft + tpot * (point.output - 1)},
        trial=serving,
        assumed="the server's default flags; 10 requests a user",
    )


def _all_at_once(point: _Point) -> list[Request]:
    return [Request(number, 0.0, point.prompt, point.output) for number in range(point.users)]
