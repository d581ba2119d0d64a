"""Every Triton kernel on a real GPU, in one run: checked against the reference, tuned, timed, written as JSON.

    python3 experiments/benchmarks/gpu_kernels.py --out OUT [--only checks,tune,steps] [--budget 290]

It imports torch, triton, numpy and our kernels. Stages run in processes of their own, so that a kernel that breaks the
device's context takes its stage with it and no other; a kernel that merely fails is reported with its error's last
line, and its stage goes on. Tuned configs go to OUT/<device>.json, which belongs into kernels/tuned/.

The shape that is timed is Qwen3-8B's; ceilings are those measured on an H200 (copy 4.3 TB/s, bf16 matrix product 790
TFLOP/s, cuDNN causal attention 524 TFLOP/s).

Method: inputs are fresh random numbers, outputs and unused KV are filled with NaN before each check. Timings are
medians of graph replays between CUDA events; one graph holds many launches, which go round several sets of inputs
that together are larger than the second-level cache. Steps are 36 layers with weights and KV of their own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.benchmarks.gpu.kernels.run import main

if __name__ == "__main__":
    main(__doc__ or "")
