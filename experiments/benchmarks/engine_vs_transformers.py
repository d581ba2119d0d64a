"""Our engine against `transformers` `generate` on this machine: the same prompts, the same number of greedy tokens.

    python -m experiments.benchmarks.engine_vs_transformers [--models tiny,smollm] [--batches 8,32] [--rounds 5]

Ours is the whole thing (loop, scheduler, policy, backend), not the bare model. All prompts of a batch are equally
long, so `generate` pads nothing. The two take turns (ABAB) in one process with the same threads; the ratio is the
median over rounds of their times in the same round, of wall seconds and of CPU seconds of the whole process: the
latter is what other work on the machine disturbs least. Results go to `results/engine_vs_transformers.json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.backend import TorchBackend
from engine.load import load_model
from engine.models.decoder import Decoder
from engine.smollm import smollm
from engine.tiny import tiny
from experiments import provenance
from playground.core import Done, Request, Sampling, Step
from playground.loop import serve
from playground.scheduler import Scheduler
from playground.trace import NoTrace
from playground.workload.source import OpenLoop
from policies.budget import Unified
from policies.composed import Composed

RESULTS = Path(__file__).parent / "results" / "engine_vs_transformers.json"

CHECKPOINTS: dict[str, Callable[[], Path]] = {"tiny": tiny, "smollm": smollm}

Prompts = list[list[int]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one batch size. Times are wall seconds, each the median over rounds, from start to last token."""

    model: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    ours: float
    transformers: float
    ratio: float
    """transformers / ours, the median over rounds."""
    ratios: tuple[float, ...]
    """Of every round, sorted."""
    cpu_ratio: float
    """As `ratio`, of CPU seconds."""
    equal_tokens: float
    """Share of the tokens that are the same in both answers."""


class Collected(NoTrace):
    """The tokens of every sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def committed(self, done: Done, step: Step) -> None:
        for id, tokens in done.tokens.items():
            self.tokens.setdefault(id, []).extend(tokens)


def ours(model: Decoder, backend: TorchBackend, prompts: Prompts, new_tokens: int) -> Tokens:
    """Serve the prompts as requests that are all there from the start."""
    now, sampling = backend.now(), Sampling(ignore_eos=True)
    requests = [
        Request(id, now, len(prompt), new_tokens, prompt=tuple(prompt), sampling=sampling)
        for id, prompt in enumerate(prompts)
    ]
    collected = Collected()
    scheduler = Scheduler(backend.spec, Composed(Unified(tokens=backend.spec.max_tokens)))
    serve(OpenLoop(requests), scheduler, backend, collected)
    return [collected.tokens[id] for id in range(len(prompts))]


def theirs(model: Any, prompts: Prompts, new_tokens: int) -> Tokens:
    """`generate`, with its default cache and attention."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answers: Tokens = out[:, ids.shape[1] :].tolist()
    return answers


def measure(name: str, batch: int, prompt_tokens: int, new_tokens: int, rounds: int) -> Row:
    """Both, in turn, `rounds` times after one round that does not count."""
    from transformers import AutoModelForCausalLM

    folder = CHECKPOINTS[name]()
    model = load_model(folder)
    loader: Any = AutoModelForCausalLM
    reference = loader.from_pretrained(folder, dtype=torch.float32)
    rng = np.random.default_rng(batch)
    prompts: Prompts = rng.integers(3, model.shape.vocabulary, (batch, prompt_tokens)).tolist()
    blocks = batch * -(-(prompt_tokens + new_tokens) // 16)
    backend = TorchBackend(model, blocks=blocks, max_tokens=batch * prompt_tokens)
    sides = (
        lambda: ours(model, backend, prompts, new_tokens),
        lambda: theirs(reference, prompts, new_tokens),
    )
    answers = [side() for side in sides]
    times = [[timed(side) for side in sides] for _ in range(rounds)]
    backend.close()
    walls = [(our.wall, their.wall) for our, their in times]
    ratios = sorted(their / our for our, their in walls)
    return Row(
        model=name,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        ours=statistics.median(our for our, _ in walls),
        transformers=statistics.median(their for _, their in walls),
        ratio=statistics.median(ratios),
        ratios=tuple(ratios),
        cpu_ratio=statistics.median(their.cpu / our.cpu for our, their in times),
        equal_tokens=float((np.array(answers[0]) == np.array(answers[1])).mean()),
    )


class Taken(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def timed(run: Callable[[], Tokens]) -> Taken:
    """How long it takes, by the clock and in CPU time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def table(rows: list[Row]) -> str:
    """For people."""
    lines = ["model   batch  prompt  new   ours tok/s  transformers tok/s  ratio (min..max)  of CPU time  equal tokens"]
    for row in rows:
        tokens = row.batch * row.new_tokens
        lines.append(
            f"{row.model:7} {row.batch:5} {row.prompt_tokens:7} {row.new_tokens:4} {tokens / row.ours:12.1f} "
            f"{tokens / row.transformers:19.1f} {row.ratio:6.2f} ({row.ratios[0]:.2f}..{row.ratios[-1]:.2f}) "
            f"{row.cpu_ratio:11.2f} {row.equal_tokens:13.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            print(f"measuring {name} at batch {batch} ...", flush=True)
            rows.append(measure(name, batch, options.prompt_tokens, options.new_tokens, options.rounds))
    print(table(rows))
    content = {"threads": options.threads, "load_average": os.getloadavg(), "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    provenance.write(options.out, {**provenance.facts(), "cpu": _cpu(), **content})
    print(f"written to {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="tiny,smollm", help=f"of {', '.join(CHECKPOINTS)}")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def _cpu() -> str:
    """The processor's name as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
