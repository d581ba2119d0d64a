"""What runs at the same time?

An overlap says how many steps may be outstanding, which lane a slice goes to, and who may be placed while lanes are
busy. How lanes share a device is the backend's to say (in simulation: `backend/contention`).
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.core import MAIN, Spec
from playground.draft import Draft
from playground.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far planning runs ahead of results: `run_ahead` steps outstanding per pipeline stage.

    1: a step is planned when the last one is known. 2: the next step is planned while one runs, one step stale
    (asynchronous scheduling: vLLM 0.14, SGLang 0.4 "zero-overhead"); needs a backend that forwards tokens.
    """

    run_ahead: int = 1

    def __post_init__(self) -> None:
        if self.run_ahead < 1:
            raise ValueError(f"policy.overlap.run_ahead={self.run_ahead} must be at least 1")

    def outstanding(self, spec: Spec) -> int:
        """Steps per pipeline stage that may be in flight."""
        return self.run_ahead

    def lane(self, sequence: Sequence) -> str:
        """Of the sequence's next slice."""
        return MAIN

    def due(self, draft: Draft, sequences: list[Sequence]) -> list[Sequence]:
        """Those that may be placed now."""
        return sequences

    def admits(self, draft: Draft) -> bool:
        """Whether waiting sequences may be placed now."""
        return True

    @property
    def steady(self) -> bool:
        """Whether what is placed depends on nothing that comes back in between steps."""
        return True


PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Prefills and decodes in a lane each: a long prompt no longer holds up the next tokens of others.

    Each lane gets its next slices when its last ones came back, whatever the other does; a sequence changes lanes when
    its prompt is done. Both lanes of a step share its budget (Nexus, Bullet, MuxServe in one engine; RapidLLM analysed
    it and dropped it for contention, so see `backend/contention`). Host time is not hidden: lanes are planned when they
    are idle.
    """

    def outstanding(self, spec: Spec) -> int:
        """One for each lane: prefills, decodes, copies in and out."""
        if spec.stages > 1:
            raise ValueError(
                f"policy.overlap=prefill_decode and parallel.stages={spec.stages} do not compose: a pipeline's stages "
                "are busy with other steps already; set parallel.stages=1"
            )
        if spec.lockstep:
            raise ValueError(
                "policy.overlap=prefill_decode and parallel.dp_attention=true do not compose: ranks in lockstep wait "
                "for whole steps; set parallel.dp_attention=false"
            )
        return 4

    def lane(self, sequence: Sequence) -> str:
        return DECODE if sequence.decoding else PREFILL

    def due(self, draft: Draft, sequences: list[Sequence]) -> list[Sequence]:
        """Those of idle lanes that have nothing in flight in the other."""
        busy = self._busy(draft)
        return [one for one in sequences if not one.in_flight and self.lane(one) not in busy]

    def admits(self, draft: Draft) -> bool:
        return PREFILL not in self._busy(draft)

    @property
    def steady(self) -> bool:
        return False

    def _busy(self, draft: Draft) -> set[str]:
        """Lanes with slices in flight, but for those of victims, which the device does before what comes next."""
        if not draft.in_flight:
            return set()
        flying = {(one.id, one.epoch) for one in draft.running if one.in_flight}
        parts = [part for step in draft.in_flight for part in step.slices]
        return {part.lane for part in parts if (part.sequence, part.epoch) in flying}
