"""What the delayer is for, in simulation: prompts of ranks in lockstep that never come together."""

import numpy as np
from hydra import compose, initialize_config_module

from experiments import launcher, settings
from experiments.build import build
from experiments.groundtruth.recorder import InMemory
from experiments.overrides import completing
from playground.core import Request
from playground.loop import serve
from playground.workload.source import OpenLoop

DECODES, PROMPTS, APART = 24, 80, 0.03


def misaligned(prompts: int) -> OpenLoop:
    """Both ranks (by turns) decode all along; every 30 ms a prompt of 2,000 tokens comes to the next of them."""
    decoding = [Request(id, 0.0, 64, 400, 400) for id in range(DECODES)]
    return OpenLoop(decoding + [Request(DECODES + n, 0.5 + n * APART, 2000, 8, 8) for n in range(prompts)])


def served(align: str, prompts: int = PROMPTS) -> tuple[float, float]:
    """P99 of the TPOT of those that decode all along, and the mean TTFT."""
    options = [
        f"policy/align={align}", "parallel=dp_attention", "parallel.ep=2", "model=qwen3-30b-a3b", "device=h200",
    ]  # fmt: skip
    with initialize_config_module("conf", version_base="1.3"):
        config = completing(lambda given: compose("config", given), ["run_dir=nowhere", *options])
    parts, recorder = build(settings.read(config)), InMemory()
    serve(misaligned(prompts), parts.scheduler, parts.backend, recorder)
    assert len(recorder.tpot) == DECODES + prompts
    return float(np.percentile(recorder.tpot[recorder.outputs == 400], 99)), float(recorder.ttft.mean())


def test_prompts_that_wait_for_one_another_stall_decodes_less_and_start_later():
    settings.register()
    launcher.register()
    quiet, _ = served("free", prompts=0)
    (free, soon), (delayed, late) = served("free"), served("prefill_delayer")
    assert delayed - quiet < 0.92 * (free - quiet)
    assert late > 1.5 * soon
