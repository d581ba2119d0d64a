"""Models on two GPUs beside one, in one run on one host, written as JSON.

    python -m experiments.benchmarks.ranks --out OUT [--parts tp,pp,...] [--budget 500] [--commit SHA]

It imports torch, triton, numpy, transformers, safetensors, pandas, pyarrow and the playground without its front door. A
part that fails is reported with its error's last line, and the others go on; what would begin after the budget of
seconds is left out. With one GPU the halves that need no other are measured, and the report names the rest. `--tiny`
tries everything with tiny models, on the CPU over Gloo where there is no GPU; `--share-gpus` has ranks share a GPU
where there are too few: that everything runs is shown by both, and their times mean nothing. The pipeline's
simulated twin needs simpy and no GPU: `python -m experiments.benchmarks.ranks.twin OUT/ranks.json`.

Method. Random weights of the models' shapes in bf16 and made-up prompts, served through the real scheduler, policies
and worker processes; one GPU is a crew of one worker. Decode steps: medians of the time between the ends of successive
steps, planned one ahead. Saturation: a closed loop that is full and warm, watched for a window; tokens of answers a
second. Bubbles: causes as docs/parallel.md defines them, over a whole run. Tokens and logprobs: those of one GPU with
the same weights; logprobs are compared up to the first other token. Capacity: tokens of KV that fit. Prefill: one step
of whole prompts, from its begin to its end on the devices; what communication costs is the difference to one GPU that
computes what one of the two does and sends nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.facts import facts
from experiments.benchmarks.gpu.parts import some_of
from experiments.benchmarks.ranks.bench import Bench
from experiments.benchmarks.ranks.capacity import time_capacity
from experiments.benchmarks.ranks.halves import time_overlap
from experiments.benchmarks.ranks.mixture import check_mixture
from experiments.benchmarks.ranks.pipeline import time_bubbles, time_saturation
from experiments.benchmarks.ranks.sizes import FULL, TINY
from experiments.benchmarks.ranks.tensor import time_decode

PARTS: dict[str, Callable[[Bench], None]] = {
    "tp": time_decode,
    "pp": time_saturation,
    "dpa": check_mixture,
    "mla": time_capacity,
    "bubbles": time_bubbles,
    "overlap": time_overlap,
}


def run(bench: Bench, parts: list[str]) -> int:
    """Every part by itself; the exit code."""
    for name in parts:
        bench.report.attempt(name, partial(PARTS[name], bench))
    bench.report.show()
    bench.report.write()
    return int(bool(bench.report.failures) or not all(check["good"] for check in bench.report.checks))


def main() -> int:
    options = _parser().parse_args()
    # Never NVLink multicast: it can put GPUs out of service that others share.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gpus = torch.cuda.device_count()
    if not gpus and not options.tiny:
        _parser().error("needs a CUDA device; --tiny does without")
    report = Report(options.out, options.budget, __doc__ or "", "ranks")
    report.facts |= facts(options.commit) | {"gpus": gpus, "tiny": options.tiny, "share_gpus": options.share_gpus}
    with tempfile.TemporaryDirectory() as folder:
        sizes = TINY if options.tiny else FULL
        device = "cuda" if gpus else "cpu"
        bench = Bench(report, sizes, Path(folder), device, gpus or 4, share_gpus=options.share_gpus)
        return run(bench, options.parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for ranks.json")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which no other part begins")
    parser.add_argument("--commit", default="", help="of this tree, where it lies without its history")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that everything runs")
    parser.add_argument("--share-gpus", action="store_true", help="where ranks are more than GPUs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
