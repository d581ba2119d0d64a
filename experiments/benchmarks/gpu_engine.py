"""The GPU engine on a real GPU, in one run: checked against the CPU engine, timed, written as JSON.

    python3 experiments/benchmarks/gpu_engine.py --out OUT [--only check,decode,...] [--budget 360]

It imports torch, triton, numpy, transformers, safetensors and the playground without its front door. A part that fails
is reported with its error's last line, and the others go on; what would begin after the budget of seconds is left out.

Method. Checks: greedy tokens in float32 of tiny checkpoints, served through the real scheduler in many ways on KV
pools filled with NaN, equal the CPU engine's; logits are held to the bounds below, as ||out - ref|| / ||ref||. Timings:
random weights of Qwen3-8B's shape in bf16, random prompts, served through the real scheduler and policy; device times
are CUDA events around a step, medians over steps; intervals are between the ends of successive steps. Limits are bytes
over 4.3 TB/s or operations over 790 TFLOP/s, both measured on an H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backend import TorchBackend
from engine.config import find_config
from engine.cuda.backend import CudaBackend
from engine.cuda.swap import Swap
from engine.kv import KvPool, block_bytes
from engine.load import load_model, random_model
from engine.models.decoder import Decoder, Inputs
from engine.tiny import ARCHITECTURES, tiny
from engine.weights import Linear, read_weights
from kernels.batch import DeviceBatch, PagedBatch
from kernels.registry import IMPLEMENTATIONS, chosen, select
from playground.backend import Backend
from playground.core import Done, Request, Sampling, Step
from playground.draft import How
from playground.loop import serve
from playground.rank import hash_tokens
from playground.scheduler import Ended, Event, Group, Scheduler
from playground.workload.source import OpenLoop
from policies.admission import Always
from policies.budget import ChunkedPrefill
from policies.composed import Composed
from policies.overlap import Overlap
from policies.victims import LastArrived

ROOT = Path(__file__).resolve().parents[2]
COPY = 4.3e12
"""Bytes a second."""
MATMUL = 790e12
"""Operations a second."""
MODEL = "qwen3-8b"
SIZE = 16

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of the relative error of a tiny model's logits, against float32 on a CPU with the same weights."""


# --- report


@dataclass
class Report:
    """What the run found, in the order found; written after every part."""

    out: Path | None
    budget: float
    began: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Carry out `work` if there is time; a failure is a line of the report, not the end of the run."""
        began = time.perf_counter()
        if began - self.began > self.budget:
            self.failures.append({"name": name, "error": "no time left", "at": ""})
            return None
        print(f"[{began - self.began:5.0f}s] {name}", flush=True)
        result = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever is raised, the other parts go on
            lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
            place = traceback.extract_tb(error.__traceback__)[-1]
            last = f"{type(error).__name__}: {lines[-1].strip()[:300]}"
            self.failures.append({"name": name, "error": last, "at": f"{Path(place.filename).name}:{place.lineno}"})
            print(f"FAILED {name}: {last} at {self.failures[-1]['at']}", flush=True)
            traceback.print_exception(error, limit=-4, file=sys.stdout)
        self.seconds[name] = time.perf_counter() - began
        self.write()
        return result

    def check(self, name: str, good: bool, **details: Any) -> None:
        self.checks.append({"name": name, "good": good, **details})
        if not good:
            print(f"WRONG {name}: {details}", flush=True)

    def row(self, work: str, measured: float, unit: str, limit: float = 0.0, target: float = 0.0, **more: Any) -> None:
        self.rows.append(dict(work=work, limit=limit, target=target, measured=measured, unit=unit, **more))
        print(_line(self.rows[-1]), flush=True)

    def write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        found = {
            "method": __doc__, "facts": self.facts, "rows": self.rows, "checks": self.checks,
            "failures": self.failures, "seconds": self.seconds,
        }  # fmt: skip
        (self.out / "gpu_engine.json").write_text(json.dumps(found, indent=1, default=str) + "\n")

    def show(self) -> None:
        good = sum(check["good"] for check in self.checks)
        print(f"\n{good} of {len(self.checks)} checks are good")
        for check in self.checks:
            if not check["good"]:
                print(f"  WRONG {check}")
        print(f"\n{'work':52s} {'limit':>9s} {'target':>9s} {'measured':>9s}")
        print("\n".join(_line(row) for row in self.rows))
        print("\n".join(f"FAILED {f['name']}: {f['error']} {f['at']}" for f in self.failures))


def _line(row: dict[str, Any]) -> str:
    numbers = [f"{row[name]:9.3f}" if row[name] else " " * 9 for name in ("limit", "target", "measured")]
    known = {"work", "limit", "target", "measured", "unit"}
    more = ", ".join(f"{name} {_short(value)}" for name, value in row.items() if name not in known)
    missed = " MISSED" if row["target"] and row["measured"] > row["target"] else ""
    return f"{row['work']:52s} {' '.join(numbers)} {row['unit']}{missed}  {more}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def facts() -> dict[str, Any]:
    def told(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": told("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernels": {op: chosen(op, "cuda") for op in IMPLEMENTATIONS},
    }


# --- serving


class Recorder:
    """Keeps everything that came back."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.done: list[tuple[Step, Done]] = []
        self.ends: dict[int, Ended] = {}
        self.events: list[Event] = []

    def arrived(self, request: Request) -> None: ...
    def looked(self, now: float, commits: int) -> None: ...
    def launched(self, step: Step, group: Group) -> None: ...

    def committed(self, done: Done, step: Step) -> None:
        self.done.append((step, done))
        for id, tokens in done.tokens.items():
            if id not in self.ends:
                self.tokens.setdefault(id, []).extend(tokens)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    def ended(self, ended: Ended) -> None:
        self.ends[ended.request.id] = ended


class Watched:
    """A backend, and how long the host is busy before, in and after each launch."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.spec = inner.spec
        self.planning: dict[int, float] = {}
        """Seconds of the loop and the scheduler before each launch, by step."""
        self.preparing: dict[int, float] = {}
        """Seconds in `launch`."""
        self.landing: list[float] = []
        """Seconds for taking a completion's tokens in."""
        self._left = 0.0
        if isinstance(inner, CudaBackend):
            self._land = inner._land
            inner.__dict__["_land"] = self._timed_land

    def now(self) -> float:
        return float(self._inner.now())

    def launch(self, step: Step) -> None:
        entered = time.perf_counter()
        self.planning[step.id] = entered - self._left if self._left else 0.0
        self._inner.launch(step)
        self._left = time.perf_counter()
        self.preparing[step.id] = self._left - entered

    def wait(self, until: float = math.inf) -> Done | None:
        done: Done | None = self._inner.wait(until)
        self._left = time.perf_counter()
        return done

    def close(self) -> None:
        if isinstance(self._inner, CudaBackend):
            del self._inner.__dict__["_land"]

    def _timed_land(self, *arguments: Any) -> Done:
        began = time.perf_counter()
        done = self._land(*arguments)
        self.landing.append(time.perf_counter() - began)
        return done


@dataclass
class Served:
    """A workload that was served, and what it took."""

    recorder: Recorder
    watched: Watched
    scheduler: Scheduler
    began: float

    @property
    def tokens(self) -> dict[int, list[int]]:
        return self.recorder.tokens

    @property
    def duration(self) -> float:
        return max(done.finished for _, done in self.recorder.done) - self.began

    @cached_property
    def preemptions(self) -> int:
        return sum(event.kind in ("recompute", "swap") for event in self.recorder.events)

    def decodes(self, rows: int) -> list[tuple[Step, Done]]:
        """Steps of nothing but so many decodes; not the first and last few."""
        found = [
            (step, done)
            for step, done in self.recorder.done
            if len(step.slices) == rows and all(part.length == 1 for part in step.slices)
        ]
        return found[4:-4] if len(found) > 16 else found

    def tpot(self) -> list[float]:
        """Seconds from the first token to the last over the tokens between, of each request."""
        ends = self.recorder.ends.values()
        return [
            (e.finished - (e.sequence.first_token or 0.0)) / (e.sequence.returned - 1)
            for e in ends
            if e.sequence.returned > 1
        ]


def policy(tokens: int = 8192, ahead: int = 2, how: How = How.RECOMPUTE) -> Composed:
    return Composed(ChunkedPrefill(tokens), admission=Always(), victims=LastArrived(how), overlap=Overlap(ahead))


def served(backend: Backend, requests: Sequence[Request], rules: Composed, prefix_cache: bool = False) -> Served:
    """Serve requests, all of which arrive now."""
    watched, recorder = Watched(backend), Recorder()
    scheduler = Scheduler(backend.spec, rules, prefix_cache=prefix_cache)
    began = backend.now()
    gc.collect()
    gc.disable()  # a collection of all that torch has made takes longer than a step
    try:
        serve(OpenLoop([replace(request, arrival=began) for request in requests]), scheduler, watched, recorder)
    finally:
        gc.enable()
        watched.close()
    _forget(backend, scheduler)
    return Served(recorder, watched, scheduler, began)


def _forget(backend: Backend, scheduler: Scheduler) -> None:
    """Tell the backend which sequences have ended: the scheduler does so with the next step only."""
    ids = tuple(id for group in scheduler.groups for id in group.ends)
    backend.launch(Step(1 << 40, 0, 0.0, (), ends=ids))


def alike(count: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
    """Requests with random prompts of one length; what they say ends by number only."""
    return [Request(seed * 100_000 + id, 0.0, prompt, output, output) for id in range(count)]


def idle_share(done: Sequence[Done]) -> float:
    """The part of the time that the device spends between steps."""
    gaps = sum(max(later.started - earlier.finished, 0.0) for earlier, later in pairwise(done))
    return gaps / max(done[-1].finished - done[0].started, 1e-9)


# --- checks


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


def conversations(sampling: Sampling | None = None) -> list[Request]:
    """Prompts of many lengths, some of which begin alike."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 512, 70).tolist()
    requests = []
    for id in range(14):
        own = rng.integers(3, 512, int(rng.integers(1, 110))).tolist()
        prompt = tuple((shared if id % 3 == 0 else []) + own)
        how = sampling or Sampling(ignore_eos=True)
        if how.temperature > 0:
            how = replace(how, seed=id)
        requests.append(
            Request(id, 0.0, len(prompt), 24 + id, prompt=prompt, hashes=hash_tokens(prompt, SIZE), sampling=how)
        )
    return requests


TIGHT: dict[str, Any] = dict(blocks=26)
WAYS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "graphs": ({}, dict(ahead=1)),
    "no graphs": (dict(graphs=False), dict(ahead=1)),
    "two ahead": ({}, dict(ahead=2)),
    "three ahead, no graphs": (dict(graphs=False), dict(ahead=3)),
    "chunks of 16": ({}, dict(tokens=16, ahead=2)),
    "recompute": (TIGHT, dict(ahead=1)),
    "recompute, two ahead": (TIGHT, dict(ahead=2)),
    "swap": (TIGHT | dict(host_blocks=64), dict(how=How.SWAP, ahead=1)),
    "swap, two ahead": (TIGHT | dict(host_blocks=64), dict(how=How.SWAP, ahead=2)),
    "prefix cache": ({}, dict(ahead=2)),
}
"""Options of the backend and of the policy."""


def tiny_backend(model: Decoder, **options: Any) -> CudaBackend:
    sizes = dict(blocks=400, block_size=SIZE, max_seqs=8, max_tokens=512, max_length=512)
    backend = CudaBackend(model, **(sizes | options))
    backend.now()
    backend._pool.data.fill_(math.nan)
    torch.cuda.synchronize()
    return backend


def check_tokens(report: Report, architecture: str, model: Decoder, expected: dict[int, list[int]]) -> None:
    for way, (options, rules) in WAYS.items():
        backend = tiny_backend(model, **options)
        cached = way == "prefix cache"
        found = served(backend, conversations(), policy(**rules), prefix_cache=cached)
        backend.close()
        wrong = {
            id: _first_difference(found.tokens[id], expected[id]) for id in expected if found.tokens[id] != expected[id]
        }
        hits = sum(end.sequence.cached_tokens for end in found.recorder.ends.values())
        happened = found.preemptions > 0 if options.get("blocks") else hits > 0 if cached else True
        report.check(
            f"greedy float32 {architecture}: {way}", not wrong and happened, differing=wrong,
            preemptions=found.preemptions, cached=hits,
        )  # fmt: skip
    drawn = []
    for way in ("graphs", "three ahead, no graphs", "recompute, two ahead"):
        options, rules = WAYS[way]
        backend = tiny_backend(model, **options)
        requests = conversations(Sampling(temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True))
        drawn.append(served(backend, requests, policy(**rules)).tokens)
        backend.close()
    report.check(f"drawn float32 {architecture}: graphs, none, recompute", drawn[0] == drawn[1] == drawn[2])
    report.check(f"drawn float32 {architecture}: not greedy", drawn[0] != expected)


def _first_difference(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def check_bfloat16(report: Report, folder: Path) -> None:
    """Rounding depends on what else is in a batch, so ways of serving differ; the same way does not."""
    model = load_model(folder, "bfloat16", "cuda")
    found = []
    for way in ("two ahead", "two ahead", "no graphs", "chunks of 16"):
        options, rules = WAYS[way]
        backend = tiny_backend(model, **options)
        found.append(served(backend, conversations(), policy(**rules)).tokens)
        backend.close()
    alike = [sum(tokens[id] == found[0][id] for id in tokens) for tokens in found]
    report.check("bfloat16: the same way twice", found[0] == found[1], sequences=len(found[0]), alike_by_way=alike)


def check_logits(report: Report, folder: Path, name: str) -> None:
    """Prefill whole, in chunks with history, and token by token; fresh tokens each time."""
    dtype = getattr(torch, name)
    config = find_config(folder)
    exact = Decoder(config, _widened(read_weights(folder, config.shape, dtype, "cpu")), select("cpu"))
    model = load_model(folder, name, "cuda")
    for cut in ([97], [40, 40, 17], [60, *[1] * 37], [1, 96]):
        tokens = torch.randint(0, config.shape.vocabulary, (97,))
        wanted = _cpu_logits(exact, tokens)
        out = _gpu_logits(model, tokens, cut)
        error = float((out.double().cpu() - wanted.double()).norm() / wanted.double().norm())
        good = error < BOUNDS[name]
        cuts = f"{len(cut)} slices from {cut[0]}"
        report.check(f"logits {config.shape.architecture} {name}: {cuts}", good, error=error, bound=BOUNDS[name])


def _widened(weights: Any) -> Any:
    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float()
        if isinstance(value, Linear):
            return Linear(value.weight.float(), None if value.bias is None else value.bias.float())
        return value

    layers = tuple(
        type(layer)(**{name: wide(getattr(layer, name)) for name in type(layer).__dataclass_fields__})
        for layer in weights.layers
    )
    return type(weights)(weights.embedding.float(), layers, weights.norm.float(), weights.head.float())


def _cpu_logits(model: Decoder, tokens: Tensor) -> Tensor:
    count = len(tokens)
    pool = KvPool(model.shape, -(-count // SIZE), SIZE, model.dtype)
    places = torch.arange(count)
    pages = PagedBatch([0], [count], torch.arange(pool.blocks)[None], SIZE)
    with torch.inference_mode():
        return model(Inputs(tokens, places, places, places, pages), pool)


def _gpu_logits(model: Decoder, tokens: Tensor, cut: Sequence[int]) -> Tensor:
    """Logits of all positions, computed slice by slice in a pool of NaN with its blocks in a random order."""
    blocks = -(-len(tokens) // SIZE)
    pool = KvPool(model.shape, blocks + 3, SIZE, model.dtype, "cuda")
    pool.data.fill_(math.nan)
    table = torch.randperm(blocks + 3)[:blocks].to("cuda", torch.int32)
    parts, start = [], 0
    with torch.inference_mode():
        for length in cut:
            positions = torch.arange(start, start + length, device="cuda")
            places = table[positions // SIZE].long() * SIZE + positions % SIZE
            batch = DeviceBatch(
                decodes=int(length == 1),
                contexts=torch.tensor([start + length], dtype=torch.int32, device="cuda"),
                tables=table[None],
                offsets=None if length == 1 else torch.tensor([0, length], dtype=torch.int32, device="cuda"),
                tokens=0 if length == 1 else length,
            )
            ids = tokens[start : start + length].to("cuda")
            parts.append(model(Inputs(ids, positions, places, None, batch), pool))
            start += length
    return torch.cat(parts)


# --- speed


class Qwen:
    """The model that is timed, and its backend: made once."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @cached_property
    def model(self) -> Decoder:
        began = time.perf_counter()
        model = random_model(MODEL, "bfloat16", "cuda")
        torch.cuda.synchronize()
        self._report.facts["random_weights_s"] = time.perf_counter() - began
        return model

    @cached_property
    def backend(self) -> CudaBackend:
        model, began = self.model, time.perf_counter()
        backend = CudaBackend(model, max_seqs=256, max_tokens=16384, max_length=8192)
        made = time.perf_counter()
        backend.now()
        self._report.facts["backend_s"] = made - began
        self._report.facts["warm_up_s"] = time.perf_counter() - made
        self._report.facts["memory"] = {
            k: getattr(backend.memory, k) for k in ("weights", "kv", "activations", "graphs")
        }
        self._report.facts["kv_blocks"] = backend.spec.blocks
        print(
            f"backend: {backend.spec.blocks} blocks; {backend.memory}; {len(backend._graphs or ())} graphs", flush=True
        )
        return backend

    def limit(self, rows: int, context: float) -> float:
        """Seconds that a decode step needs to read weights and KV."""
        shape = self.model.shape
        weights = shape.weight_bytes - shape.embedding_bytes
        return (weights + rows * context * shape.kv_bytes_per_token) / COPY

    def prefill_limit(self, count: int, prompt: int, outputs: int = 1) -> float:
        """Seconds that the products of prompts need at the matrix units' rate."""
        shape = self.model.shape
        linear = count * prompt * shape.layers * shape.linear_flops
        attention = count * prompt * (prompt + 1) / 2 * shape.layers * shape.attention_flops
        return (linear + attention + count * outputs * shape.head_flops) / MATMUL

    def release(self) -> None:
        if "backend" in self.__dict__:
            self.backend.close()
        self.__dict__.pop("backend", None)
        self.__dict__.pop("model", None)
        gc.collect()
        torch.cuda.empty_cache()


def time_decode(report: Report, qwen: Qwen) -> None:
    for rows, context, target in ((1, 512, 4.5), (32, 1024, 6.0), (128, 1024, 10.5), (256, 1024, 0.0)):
        for ahead in (2, 1):
            steps = 64
            requests = alike(rows, context - steps // 2, steps, seed=rows + ahead)
            run = served(qwen.backend, requests, policy(8192, ahead))
            found = [done for _, done in run.decodes(rows)]
            between = statistics.median(later.finished - earlier.finished for earlier, later in pairwise(found))
            device = statistics.median(done.finished - done.started for done in found)
            limit = qwen.limit(rows, context)
            report.row(
                f"decode {rows} x {context}, run_ahead {ahead}", between * 1e3, "ms", limit * 1e3, target,
                device_ms=device * 1e3, idle_share=idle_share(found), of_limit=limit / between, steps=len(found),
            )  # fmt: skip


def time_prefill(report: Report, qwen: Qwen) -> None:
    spans = []
    for turn in range(3):
        run = served(qwen.backend, alike(8, 2048, 1, seed=turn + 1), policy(16384, 1))
        spans.append(run.duration)
        (step, done), *rest = run.recorder.done
        assert not rest and sum(part.length for part in step.slices) == 8 * 2048
    limit = qwen.prefill_limit(8, 2048)
    report.row(
        "prefill 8 x 2048", statistics.median(spans), "s", limit, 0.45, of_limit=limit / statistics.median(spans),
        device_s=done.finished - done.started, host_ms=done.host * 1e3, first_s=spans[0],
    )  # fmt: skip
    for chunk in (512, 1024, 2048, 4096):
        run = served(qwen.backend, alike(4, 4096, 1, seed=10 + chunk), policy(chunk, 2))
        spans = [done.finished - done.started for step, done in run.recorder.done[1:]]
        limit = qwen.prefill_limit(4, 4096)
        report.row(
            f"prefill 4 x 4096 in chunks of {chunk}", run.duration, "s", limit, of_limit=limit / run.duration,
            step_ms=statistics.median(spans) * 1e3,
            host_ms=statistics.median(done.host for _, done in run.recorder.done) * 1e3,
            idle_share=idle_share([done for _, done in run.recorder.done]),
        )  # fmt: skip


def time_serve(report: Report, qwen: Qwen) -> None:
    """256 requests at once: prompts at the matrix units' rate, then decode steps that read weights and KV."""
    limit = qwen.prefill_limit(256, 512, 128) + 64 * qwen.limit(256, 560)
    for tokens, ahead in ((2048, 2), (8192, 2), (1024, 2), (2048, 1), (2048, 3)):
        run = served(qwen.backend, alike(256, 512, 128, seed=tokens + ahead), policy(tokens, ahead))
        done = [done for _, done in run.recorder.done]
        mixed = [(step, done) for step, done in run.recorder.done if any(part.length > 1 for part in step.slices)]
        report.row(
            f"256 x (512 + 128) at once, {tokens} a step, ahead {ahead}", run.duration, "s", limit, 6.0,
            output_tokens_per_s=256 * 128 / run.duration, steps=len(done), idle_share=idle_share(done),
            mixed_steps=len(mixed),
            mixed_device_ms=statistics.median(done.finished - done.started for _, done in mixed) * 1e3,
            mixed_host_ms=statistics.median(done.host for _, done in mixed) * 1e3,
        )  # fmt: skip
        full = run.decodes(256)
        if full:
            ids = [step.id for step, _ in full]
            planning, preparing = run.watched.planning, run.watched.preparing
            report.row(
                f"  host a step of 256 decodes, ahead {ahead}",
                statistics.median(planning[id] + preparing[id] for id in ids) * 1e3, "ms", 0.0, 1.0,
                scheduling_ms=statistics.median(planning[id] for id in ids) * 1e3,
                launch_ms=statistics.median(preparing[id] for id in ids) * 1e3,
                tokens_in_ms=statistics.median(run.watched.landing[-len(ids) :]) * 1e3,
                device_ms=statistics.median(done.finished - done.started for _, done in full) * 1e3,
                idle_share=idle_share([done for _, done in full]),
            )  # fmt: skip


def time_mixed(report: Report, qwen: Qwen) -> None:
    """Small chunks beside decodes, with graphs and without."""
    backend = qwen.backend
    graphs = backend._graphs
    for chunk in (128, 256, 512):
        for name, used in (("graphs", graphs), ("no graphs", None)):
            backend._graphs = used
            run = served(backend, alike(32, 512, 64, seed=800 + chunk + bool(used)), policy(chunk, 2))
            backend._graphs = graphs
            mixed = [done for step, done in run.recorder.done if any(part.length > 1 for part in step.slices)]
            report.row(
                f"steps of {chunk} tokens, 32 x (512 + 64), {name}",
                statistics.median(b.finished - a.finished for a, b in pairwise(mixed)) * 1e3, "ms",
                device_ms=statistics.median(done.finished - done.started for done in mixed) * 1e3,
                host_ms=statistics.median(done.host for done in mixed) * 1e3,
                idle_share=idle_share(mixed), duration_s=run.duration,
            )  # fmt: skip


def time_flight(report: Report, qwen: Qwen) -> None:
    """The shapes of a published comparison: vLLM, Llama-3.1-8B in FP8 on an H200."""
    for count, prompt, output, theirs in ((112, 1000, 100, 11.25), (96, 4000, 500, 17.1)):
        run = served(qwen.backend, alike(count, prompt, output, seed=count), policy(2048, 2))
        limit = qwen.limit(count, prompt + output / 2)
        steps = run.decodes(count)
        report.row(
            f"TPOT {count} x ({prompt} + {output}), all at once", statistics.mean(run.tpot()) * 1e3, "ms", limit * 1e3,
            vllm_fp8_ms=theirs, preemptions=run.preemptions, duration_s=run.duration,
            full_step_ms=statistics.median(d.finished - d.started for _, d in steps) * 1e3 if steps else math.nan,
            median_tpot_ms=statistics.median(run.tpot()) * 1e3,
        )  # fmt: skip


# --- parts


def time_swap(report: Report, qwen: Qwen) -> None:
    pool, blocks = qwen.backend._pool, 640
    swap = Swap(pool, blocks, pinned=True)
    piece = block_bytes(qwen.model.shape, SIZE, qwen.model.dtype)
    pool.data[:, :blocks].normal_()
    kept = pool.data[:, :blocks].clone()
    torch.cuda.synchronize()
    order = np.random.default_rng(3).permutation(blocks).tolist()
    for name, there in (("blocks in order", list(range(blocks))), ("blocks in any order", order)):
        spans = {}
        for way, move in (("out", partial(swap.out, order, there)), ("in", partial(swap.back, there, order))):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with qwen.backend._timeline.copying():
                move()
                if way == "in":
                    pool.data[:, :blocks].zero_()
                begun.record()
                move()
                ended.record()
            torch.cuda.synchronize()
            spans[way] = begun.elapsed_time(ended) / 1e3
        same = torch.equal(pool.data[:, :blocks], kept)
        report.check(f"swap round trip, {name}", same)
        report.row(
            f"swap of {blocks} blocks, {name}", blocks * piece / spans["out"] / 1e9, "GB/s out",
            back=blocks * piece / spans["in"] / 1e9, gigabytes=blocks * piece / 1e9,
        )  # fmt: skip


def time_gemm(report: Report, qwen: Qwen) -> None:
    """Every projection of a decode step, alone in a graph that goes round the layers' weights."""
    shape = qwen.model.shape
    sizes = {
        "qkv": (shape.query_width + 2 * shape.kv_width, shape.hidden), "out": (shape.hidden, shape.query_width),
        "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocabulary, shape.hidden),
    }  # fmt: skip
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for name, (outputs, inputs) in sizes.items():
            copies = max(2, min(12, math.ceil(3e8 / (outputs * inputs * 2))))
            weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(copies)]
            found = {}
            for rows in (1, 4, 8, 16, 32, 64, 128, 256):
                x = torch.randn(rows, inputs, device="cuda").bfloat16()
                span = _graph_seconds([partial(F.linear, x, weight) for weight in weights])
                found[f"m{rows}"] = outputs * inputs * 2 / span / COPY
            report.row(f"{library} {name} {outputs}x{inputs}, share of copy rate", found["m1"], "of 1", **found)
            del weights
    torch.backends.cuda.preferred_blas_library("cublas")


def _graph_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds of one call in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    spans = []
    for _ in range(5):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(4):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        spans.append(begun.elapsed_time(ended) / 1e3 / 4 / len(calls))
    return statistics.median(spans)


def profile(report: Report, qwen: Qwen) -> None:
    """Where a decode step's time goes, kernel by kernel, where the driver lets us see."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    for rows, context in ((1, 512), (32, 1024), (128, 1024)):
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            served(qwen.backend, alike(rows, context - 16, 24, seed=700 + rows), policy(8192, 2))
        shown = sorted(seen.key_averages(), key=lambda item: -item.device_time_total)[:14]
        kernels = [(item.key[:70], item.count, round(item.device_time_total / max(item.count, 1), 2)) for item in shown]
        report.facts[f"profile {rows} x {context}"] = kernels
        print(f"profile {rows} x {context} (with its prefill):", flush=True)
        print("\n".join(f"  {each:9.2f} us x {count:6d}  {name}" for name, count, each in kernels), flush=True)


def transformers(report: Report, qwen: Qwen) -> None:
    """`generate` on the same GPU and shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = qwen.model.shape
    qwen.release()
    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, max_position_embeddings=shape.max_length, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for rows in (1, 32):
        ids = torch.randint(0, shape.vocabulary, (rows, 512), device="cuda")
        spans = []
        for new in (4, 36):
            torch.cuda.synchronize()
            began = time.perf_counter()
            theirs.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
                            do_sample=False, pad_token_id=0)  # fmt: skip
            torch.cuda.synchronize()
            spans.append(time.perf_counter() - began)
        report.row(f"transformers generate, decode step {rows} x 512", (spans[1] - spans[0]) / 32 * 1e3, "ms")


PARTS: dict[str, Callable[[Report, Qwen], None]] = {
    "check": lambda report, qwen: check(report),
    "decode": time_decode,
    "prefill": time_prefill,
    "serve": time_serve,
    "mixed": time_mixed,
    "flight": time_flight,
    "swap": time_swap,
    "profile": profile,
    "gemm": time_gemm,
    "transformers": transformers,
}
USUAL = [name for name in PARTS if name != "transformers"]


def parts(text: str) -> Iterator[str]:
    for name in text.split(","):
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name}: choose from {', '.join(PARTS)}")
        yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu_engine.json")
    parser.add_argument("--only", type=lambda text: list(parts(text)), default=USUAL, help=", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=360.0, help="seconds after which no other part begins")
    options = parser.parse_args()
    report = Report(options.out, options.budget)
    report.facts |= facts()
    qwen = Qwen(report)
    for name in options.only:
        report.attempt(name, partial(PARTS[name], report, qwen))
    report.show()
    report.write()
    return 1 if report.failures or not all(check["good"] for check in report.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
