"""How the servers behind AIConfigurator's points were started, as far as scripts that are public say.

InferenceMAX: SemiAnalysisAI/InferenceX, `benchmarks/{70b_fp8,gptoss_fp4,dsr1_fp8}_{h100,h200}*.sh`, October 2025 to
March 2026. NVIDIA's own points ("gap-analysis"): flags were not published; taken are those that AIConfigurator's
generator writes (ai-dynamo/aiconfigurator, `generator/rule_plugin/{trtllm,vllm,sglang}.rule` and the templates of
each version), whose deployments its own scripts measure, behind Dynamo's front end.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.groundtruth.engines import Engine


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured. `backend`: vllm, sglang or trtllm; `model` by the shape's name."""

    backend: str
    version: str
    model: str
    tp: int
    prompt: int
    output: int
    users: int


def inference_max(point: Point) -> Engine:
    """Random prompts, no prefix cache; all engines plan a step ahead."""
    match point.backend:
        case "vllm":  # max-num-batched-tokens, max-num-seqs, async-scheduling
            return Engine("vllm", late=True, max_seqs=point.users, max_tokens=8192)
        case "sglang":  # chunked-prefill-size and max-prefill-tokens, max-running-requests
            short = point.prompt == point.output == 1024
            return Engine("sglang", late=True, max_seqs=512 if short else 256, max_tokens=32768)
    if point.model == "gpt-oss-120b":  # max_num_tokens, max_batch_size
        return Engine("trtllm", late=True, max_seqs=point.users, max_tokens=20000)
    if point.model == "deepseek-v3":  # MAX_NUM_TOKENS=$(( ($CONC+$ISL+64+63)/64*64 ))
        return Engine("trtllm", late=True, max_seqs=2048, max_tokens=(point.users + point.prompt + 127) // 64 * 64)
    waits = point.prompt == point.output == 1024 and point.tp < 8
    # batch_wait_timeout_iters 20 and batch_wait_max_tokens_ratio 0.9, of these points alone
    wait = (20, 0.9) if waits else (0, 0.0)
    return Engine("trtllm", late=True, max_seqs=2048, max_tokens=16384, wait_steps=wait[0], wait_share=wait[1])


def generated(point: Point) -> Engine:
    """A step holds one prompt and 1500 tokens more. SGLang mixes prompts and decodes, but for 0.5.1, whose template
    misspells the flag: that starts whole prompts first, up to 16384 tokens (rather than 8192: chosen on `fit` rows)."""
    tokens = point.prompt + 1500
    match point.backend:
        case "vllm":
            return Engine("vllm", max_tokens=tokens + point.users)
        case "sglang" if point.version.startswith("0.5.1"):
            return Engine("sglang", late=True, max_tokens=16384)
        case "sglang":
            return Engine("sglang_mixed", late=True, max_tokens=tokens)
    return Engine("trtllm", max_seqs=2048, max_tokens=tokens + point.users)  # disable_overlap_scheduler: true
