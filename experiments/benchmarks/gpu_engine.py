"""The GPU engine on a real GPU, in one run: checked against the CPU engine, timed, written as JSON.

    python3 experiments/benchmarks/gpu_engine.py --out OUT [--only check,decode,...] [--budget 360] [--commit SHA]

It imports torch, triton, numpy, transformers, safetensors and the playground without its front door. A part that fails
is reported with its error's last line, and the others go on; what would begin after the budget of seconds is left out.
The parts that take minutes run when asked for: `--only transformers,flight --budget 600`.

Method. Checks: greedy tokens in float32 of tiny checkpoints, served through the real scheduler in many ways on KV
pools filled with NaN, equal the CPU engine's; logits are held to 1e-4 (float32) and 5e-2 (bf16) of ||out - ref|| /
||ref||. Timings: random weights of Qwen3-8B's shape in bf16, random prompts, served through the real scheduler and
policy; device times are CUDA events around a step, medians over steps; intervals are between the ends of successive
steps. Limits are bytes over 4.3 TB/s or operations over 790 TFLOP/s, both measured on an H200. `transformers` and ours
are timed in one run on one GPU; TPOT in flight is the mean time between tokens in a closed loop that is full and warm.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.benchmarks.gpu.engine.run import main

if __name__ == "__main__":
    sys.exit(main(__doc__ or ""))
