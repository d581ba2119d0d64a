"""One small workload served by one policy: what it decided, as integers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from zlib import crc32

from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from experiments import launcher, settings
from playground.core import Request, Spec, Step
from playground.loop import serve
from playground.scheduler import Ended, Event, Scheduler
from playground.sim.backend import SimBackend
from playground.sim.cost import Linear
from playground.sim.durations import Modelled
from playground.trace import NoTrace
from playground.workload.source import OpenLoop

HERE = Path(__file__).parent
POLICIES = sorted(path.stem for path in (HERE.parents[1] / "conf" / "policy").glob("*.yaml"))
DEPTHS = (1, 4)
VARIANTS = (
    "vllm_v0 victims=largest @ 1",
    "vllm_v1 victims=largest @ 4",
    "chunked_prefill victims=largest @ 4",
    "vllm_v0 victims.how=swap @ 1",
    "vllm_v1 victims.how=swap @ 1",
    "chunked_prefill victims.how=swap @ 4",
    "vllm_v1 overlap=run_ahead @ 1",
    "vllm_v1 admission=always @ 1",
    "vllm_v1 budget.tokens=128 @ 1",
    "vllm_v1 budget.tokens=128 @ 4",
    "chunked_prefill budget.tokens=128 @ 1",
    "chunked_prefill budget.tokens=128 @ 4",
    "vllm_v1 budget.long_prefill_threshold=128 @ 1",
    "chunked_prefill order=sjf order.predictor.sigma=0.5 @ 1",
    "chunked_prefill order=sjf order/predictor=oracle @ 1",
    "chunked_prefill order=srtf order/predictor=oracle @ 1",
    "chunked_prefill order=mlfq victims.how=swap @ 1",
    "chunked_prefill order=hrrn @ 1",
    "chunked_prefill order=shortest_prefill @ 1",
    "mc_sf order/predictor=oracle admission=oracle_future_peak @ 1",
    "trtllm admission=always @ 1",
    "trtllm budget.wait_steps=5 budget.wait_share=0.5 @ 1",
    "token_throttling_2025 budget.wt=false @ 4",
    "token_throttling_2025 budget.ut=false @ 4",
    "vllm_v1 budget.tokens=128 budget.max_partial=1 @ 4",
    "sglang budget.tokens=512 budget.mixed=true @ 1",
    "sarathi_dynamic budget.low=64 budget.high=256 budget.span=1024 @ 1",
    "token_throttling_2026 budget.reserve.init=0.1 @ 4",
)
MAX_TOKENS = 256
"""What every client allows. Outputs are a quarter of the trace's, to keep the runs short."""


def cases() -> list[str]:
    """`policy @ depth` for every YAML, and `policy choice @ depth` for some of the other choices."""
    named = [f"{policy} @ {depth}" for policy in POLICIES for depth in DEPTHS]
    return sorted([*named, *VARIANTS])


def outcome(case: str) -> dict[str, int]:
    """Serve the workload as the case says."""
    chosen, _, depth = case.partition(" @ ")
    spec = Spec(blocks=800, host_blocks=800, max_seqs=64, max_tokens=8192, stages=int(depth), forwards_tokens=True)
    scheduler = Scheduler(spec, instantiate(_policy(chosen), _convert_="all"), seed=1)
    backend = SimBackend(spec, Modelled(_cost(spec.stages), spec.stages))
    tally = Tally()
    serve(OpenLoop(requests()), scheduler, backend, tally)
    return tally.integers | {"makespan_us": round(backend.now() * 1e6)}


def _cost(stages: int) -> Linear:
    """The same work however many stages share it."""
    return Linear(0.02 / stages, 1.5e-4 / stages, 1e-7 / stages, host_base=5e-4, per_transfer=1e-3, per_block=1e-4)


@cache
def _policy(chosen: str):
    """Its configuration, as the command line would compose it."""
    name, *choices = chosen.split()
    settings.register()
    launcher.register()
    overrides = [f"policy={name}", *map(_override, choices)]
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides=overrides).policy


def _override(choice: str) -> str:
    key = choice.partition("=")[0]
    return f"+policy.{choice}" if "." in key else f"policy/{choice}"


@cache
def requests() -> tuple[Request, ...]:
    rows = (HERE / "requests.csv").read_text().splitlines()[2:]
    fields = [tuple(map(int, row.split(","))) for row in rows]
    return tuple(
        Request(id, arrival_ms / 1000, prompt, MAX_TOKENS, output_length=-(-output // 4))
        for id, (arrival_ms, prompt, output) in enumerate(fields)
    )


class Tally(NoTrace):
    """What was decided, counted."""

    def __init__(self) -> None:
        self.integers = dict.fromkeys(
            ("steps", "finished", "preempted", "recomputed", "prefill_squares", "slices_crc"), 0
        )

    def launched(self, step: Step, group: object) -> None:
        counts = self.integers
        counts["steps"] += 1
        prefill = sum(part.length for part in step.slices if part.length > 1)
        counts["prefill_squares"] += prefill * prefill
        decided = [(part.sequence, part.epoch, part.start, part.length, part.samples) for part in step.slices]
        counts["slices_crc"] = crc32(repr(decided).encode(), counts["slices_crc"])

    def happened(self, event: Event) -> None:
        self.integers["preempted"] += event.kind in ("recompute", "swap")

    def ended(self, ended: Ended) -> None:
        self.integers["finished"] += ended.outcome == "finished"
        self.integers["recomputed"] += ended.sequence.recomputed
