"""TensorRT-LLM's batching: decodes, then whole prompts, which may be made to wait for more of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from playground.draft import Draft
from policies.composed import FOREVER, Admissions, Chunks, Decodes, Phase


@dataclass(frozen=True, slots=True)
class InFlight:
    """In-flight batching: all decodes first, then waiting prompts, uncut, up to `tokens` in all; one longer than that
    goes alone.

    While decodes run, prompts wait up to `wait_steps` steps for a step of at least `wait_share` of `tokens`. Meant
    with `admission=max_length`, which is its GUARANTEED_NO_EVICT; its MAX_UTILIZATION is `admission=always`, where the
    last that started pauses, and computes again, for an older one without room (`victims=last_arrived`).
    Source: TensorRT-LLM 1.x, PyTorch backend (`max_num_tokens` 8192; context chunking off by default; `scheduler.py` at
    034fffb; `batch_wait_timeout_iters`, `batch_wait_max_tokens_ratio` in `py_executor.py`).
    """

    tokens: int = 8192
    wait_steps: int = 0
    wait_share: float = 0.0
    _waited: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Steps that the prompts now waiting were held back for, by rank."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"policy.budget.tokens={self.tokens} must be at least 1")
        if self.wait_steps < 0:
            raise ValueError(f"policy.budget.wait_steps={self.wait_steps} must be 0 (off) or more")
        if not 0 <= self.wait_share <= 1:
            raise ValueError(f"policy.budget.wait_share={self.wait_share} must lie in [0, 1]")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Decodes()
        yield Chunks(self.tokens - draft.tokens)  # only of a recomputation too long for one step
        if not self._hold_back(draft):
            yield Admissions(self.tokens - draft.tokens, whole=True)

    def steady(self, draft: Draft) -> int:
        return FOREVER

    def _hold_back(self, draft: Draft) -> bool:
        """Counts only while prompts could come in: in quiet stretches, which may be skipped, none can."""
        waited = self._waited.pop(draft.rank, 0)
        if not draft.waiting or draft.seats < 1 or not draft.tokens or waited >= self.wait_steps:
            return False
        if draft.tokens + draft.waiting_tokens >= self.wait_share * self.tokens:
            return False
        self._waited[draft.rank] = waited + 1
        return True
