"""Every check of every architecture."""

from __future__ import annotations

from functools import partial

from engine.backend import TorchBackend
from engine.load import load_model
from engine.tiny import ARCHITECTURES, tiny
from experiments.benchmarks.gpu.engine.logits import BOUNDS, check_logits
from experiments.benchmarks.gpu.engine.report import Report
from experiments.benchmarks.gpu.engine.serving import SIZE, policy, served
from experiments.benchmarks.gpu.engine.tokens import check_bfloat16, check_tokens, conversations


def check(report: Report) -> None:
    for architecture in ARCHITECTURES:
        folder = report.attempt(f"make tiny {architecture}", partial(tiny, architecture))
        if folder is None:
            continue
        requests = conversations()
        reference = load_model(folder)
        backend = TorchBackend(reference, blocks=512, block_size=SIZE)
        expected = served(backend, requests, policy(ahead=1)).tokens
        backend.close()
        model = load_model(folder, device="cuda")
        report.attempt(f"check tokens {architecture}", partial(check_tokens, report, architecture, model, expected))
        for name in BOUNDS:
            report.attempt(f"check logits {architecture} {name}", partial(check_logits, report, folder, name))
        if architecture == "qwen3":
            report.attempt("check bfloat16", partial(check_bfloat16, report, folder))
