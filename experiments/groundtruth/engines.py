"""How each serving engine batches: what must be the same before its step times mean anything."""

from __future__ import annotations

from dataclasses import dataclass

from playground.policy import Policy
from policies.admission import FullPrompt, MaxLength
from policies.budget import PrefillFirst, Unified
from policies.composed import Composed
from policies.overlap import Overlap
from policies.route import RoundRobin


@dataclass(frozen=True, slots=True)
class Engine:
    """`discipline`: vllm, sglang or trtllm. `run_ahead` 2 is asynchronous scheduling. Limits as in `core.Spec`.

    The limits are the servers' defaults on GPUs with 70 GB or more where a case does not say otherwise.
    """

    discipline: str
    run_ahead: int = 1
    max_seqs: int = 1024
    max_tokens: int = 8192

    def policy(self) -> Policy:
        overlap = Overlap(self.run_ahead)
        if self.discipline == "sglang":  # prefill-first, prompts of up to chunked_prefill_size whole
            return Composed(PrefillFirst(self.max_tokens), admission=FullPrompt(0.0), overlap=overlap)
        if self.discipline == "trtllm":  # GUARANTEED_NO_EVICT
            return Composed(Unified(self.max_tokens), admission=MaxLength(), overlap=overlap)
        # Since March 2026 vLLM has a whole prompt's blocks free before it starts it; a watermark is off by default.
        return Composed(Unified(self.max_tokens), admission=FullPrompt(0.0), route=RoundRobin(), overlap=overlap)
