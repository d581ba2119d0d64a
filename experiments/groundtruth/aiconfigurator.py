"""NVIDIA AIConfigurator's measured points: closed loops of equal requests on H100 and H200; mean TTFT and TPOT only.

The servers' flags are not in the file: `servers` says which are taken. InferenceMAX publishes what its client sends (10
requests a user, lengths between 0.8 and 1 of the nominal ones); for the points that NVIDIA measured we take what
AIConfigurator's own script sends (as many requests, of equal lengths).
"""

from __future__ import annotations

from collections import Counter

from experiments.groundtruth import data
from experiments.groundtruth.case import Case, Skipped
from experiments.groundtruth.costs import Hardware
from experiments.groundtruth.servers import Point, generated, inference_max
from experiments.groundtruth.serving import ClosedLoad, Serving

SOURCE = "aiconfigurator"
Row = dict[str, str]

MODELS = {
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
OWN = ("deepseek-v3", "gpt-oss-120b")
"""Shapes that ship in the format they are served in."""
FORMATS = {"": None, "fp8": "fp8", "fp8_block": "fp8"}
DEVICES = {"h100_sxm": "h100", "h200_sxm": "h200"}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
INFERENCE_MAX = "InferenceX/InferenceMAX dump"
SHORTEST = 0.8
"""InferenceMAX's RANDOM_RANGE_RATIO: lengths are drawn evenly from this share of the nominal one up to it."""


def cases() -> list[Case]:
    return [_case(row) for row in _rows() if not _obstacle(row)]


def skipped() -> list[Skipped]:
    told = Counter((row["model_path"], why) for row in _rows() if (why := _obstacle(row)))
    return [Skipped(SOURCE, model, count, why) for (model, why), count in told.items()]


def _rows() -> list[Row]:
    return data.table("aiconfigurator/hopper_e2e.csv.xz")


def _obstacle(row: Row) -> str:
    """Why a row cannot be replayed; empty if it can."""
    if row["model_path"] not in MODELS:
        return "no shape of this model ships"
    if _number(row, "pp_size") > 1 or _number(row, "attention_dp_size") > 1:
        return "pipelines and DP attention are not in this replay"
    tp, expert_ranks = _number(row, "tp_size"), _number(row, "moe_tp_size") * _number(row, "moe_ep_size")
    if tp > 8:
        return "more ranks than a host has GPUs: misread from the run's name"
    shape = _hardware(row).shape
    if shape.experts and expert_ranks != tp:
        return "experts over other ranks than attention"
    try:
        _hardware(row).kv_blocks()
    except ValueError:
        return "by our count its weights leave no room for KV"
    return ""


def _number(row: Row, name: str) -> int:
    return int(float(row[name] or 1))


def _hardware(row: Row) -> Hardware:
    model = MODELS[row["model_path"]]
    weights = None if model in OWN else FORMATS[row["gemm_quant_mode"]]
    # NVIDIA's FP8 checkpoints for TensorRT-LLM hold keys and values in FP8, too.
    kv = "fp8" if row["backend"] == "trtllm" and weights else None
    if row["backend"] == "vllm" and (model, row["system"]) == ("llama-3.1-70b", "h200_sxm"):
        kv = "fp8"  # InferenceMAX: kv-cache-dtype
    ep = _number(row, "moe_ep_size") if _model_has_experts(model) else 1
    # InferenceMAX sets VLLM_MXFP4_USE_MARLIN=1 on Hopper.
    marlin = row["backend"] == "vllm" and model == "gpt-oss-120b"
    device, tp = DEVICES[row["system"]], _number(row, "tp_size")
    return Hardware(model, device, tp, weights=weights, kv=kv, ep=ep, marlin=marlin)


def _model_has_experts(model: str) -> bool:
    return Hardware(model, "h200").shape.experts is not None


def _case(row: Row) -> Case:
    hardware, users = _hardware(row), _number(row, "concurrency")
    prompt, output = int(row["isl"]), int(row["osl"])
    drawn = row["source"] == INFERENCE_MAX
    load = ClosedLoad(users, prompt, output, SHORTEST if drawn else 1.0)
    backend = NAMES[row["backend"]]
    point = Point(row["backend"], row["backend_version"], hardware.model, hardware.tp, prompt, output, users)
    engine = inference_max(point) if drawn else generated(point)
    front = f"{backend}, {'InferenceMAX' if drawn else 'NVIDIA'}"
    # Random prompts share nothing.
    serving = Serving(hardware, engine, f"{backend}, {hardware.model}", load, prefix_cache=False, front=front)
    ttft, tpot = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
    return Case(
        source=SOURCE,
        name=f"{prompt}/{output} tokens, {users} users",
        split="fit" if row["split"] == "fit" else "test",
        engine=f"{backend} {row['backend_version']}".strip(),
        model=f"{hardware.model}{' ' + hardware.weights if hardware.weights else ''}",
        device=hardware.device,
        tp=hardware.tp,
        load="saturated" if serving.saturated(users, prompt + output) else "below saturation",
        measured={"ttft": ttft, "tpot": tpot, "e2el": ttft + tpot * (load.mean_output - 1)},
        trial=serving,
        assumed="" if drawn else "the flags that AIConfigurator generates; 10 requests a user",
    )
