"""How each serving engine batches: what must be the same before its step times mean anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiments.groundtruth.late import StepLate
from playground.policy import Policy
from policies.admission import FullPrompt, MaxLength
from policies.budget import ChunkedPrefill, PrefillFirst, Unified
from policies.composed import Budget, Composed
from policies.inflight import InFlight
from policies.overlap import Overlap
from policies.route import RoundRobin


@dataclass(frozen=True, slots=True)
class Engine:
    """`discipline`: sglang starts whole prompts before it decodes; sglang_mixed puts decodes beside them
    (`--enable-mixed-chunk`). `run_ahead` 2 is asynchronous scheduling; `late` stands for it where steps should be
    skipped through (`late.StepLate`). `wait_steps`, `wait_share`: as in `policies.inflight`. Limits as in `core.Spec`.

    The limits are the servers' defaults on GPUs with 70 GB or more where a case does not say otherwise.
    """

    discipline: Literal["vllm", "sglang", "sglang_mixed", "trtllm"]
    run_ahead: int = 1
    late: bool = False
    max_seqs: int = 1024
    max_tokens: int = 8192
    wait_steps: int = 0
    wait_share: float = 0.0

    def policy(self) -> Policy:
        # TensorRT-LLM's GUARANTEED_NO_EVICT. Since March 2026 vLLM has a whole prompt's blocks free before it starts
        # it; a watermark is off by default.
        admission = MaxLength() if self.discipline == "trtllm" else FullPrompt(0.0)
        composed = Composed(self._budget(), admission=admission, route=RoundRobin(), overlap=Overlap(self.run_ahead))
        return StepLate(composed) if self.late else composed

    def _budget(self) -> Budget:
        match self.discipline:
            case "sglang":
                return PrefillFirst(self.max_tokens)
            case "sglang_mixed":
                return ChunkedPrefill(self.max_tokens)
            case "trtllm":
                return InFlight(self.max_tokens, self.wait_steps, self.wait_share)
            case "vllm":
                return Unified(self.max_tokens)
