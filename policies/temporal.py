"""Prefill and decode apart in time: TD-Pipe's phases for pipelines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from playground.draft import Draft
from playground.sequence import Sequence
from policies.budget import running_decodes
from policies.composed import Admissions, Chunks, Decodes, Phase
from policies.predictors import LogNormal, Predictor

HORIZONS = (5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens from now at which the KV in use is foreseen."""


@dataclass(frozen=True, slots=True)
class TemporalPhases:
    """Nothing but prompts for as long as memory will hold their answers, then nothing but decodes until prompts pay.

    Prefill phase: whole prompts, until a step has `batch` tokens. It ends when nobody waits or fits, or when the KV
    foreseen reaches `full` of the pool: the most of sum(ceil(length / block size) + ceil(m / block size)) over those
    predicted (by `predictor`) to sample m more tokens, for m = 5, 8, 16, ..., 4096.
    Decode phase: running decodes / stages a step, the remainder by turns, taken from all that are ready, so that
    micro-batches stay even as answers end (work stealing). Once every `stages` steps it asks whether to go back, by
    the share of the devices that is in use; the smaller one gives way. With decodes: (b / t(b)) / (256 / t(256)) for b
    of them in a micro-batch, 1 from `batch` on, t(n) = max(`floor`, `per_token` n) seconds. With prompts: 1 - bubble /
    time, where time is what all that would be let in take on one stage and the longest of them on the others, and the
    bubble is (stages - 1) (t(longest) - t(b')) / stages with b' of them and decodes in a micro-batch.
    Source: TD-Pipe (ICPP'25, arXiv 2506.10470, of which only the abstract was read), `core/scheduler.py` of
    MLSysU/TD-Pipe 0d8ac8b (batch 192, full 0.9), whose table of times for Llama-13B on an L20 is `floor` and
    `per_token` to within a third. There the bubble's decode time is of all stages. Not taken over: at least two decodes
    a step, and the last few ready ones on top.
    """

    predictor: Predictor = field(default_factory=LogNormal)
    batch: int = 192
    full: float = 0.9
    floor: float = 0.045
    per_token: float = 2.6e-4
    _usage: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """KV foreseen at each horizon, of ranks in their prefill phase."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"policy.budget.batch={self.batch} must be at least 1")
        if not 0 < self.full <= 1:
            raise ValueError(f"policy.budget.full={self.full} must lie in (0, 1]")
        for name in ("floor", "per_token"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"policy.budget.{name}={value} must be more than 0 seconds")

    def phases(self, draft: Draft) -> Iterator[Phase]:
        yield Chunks()  # only of a recomputation too long for one step
        if draft.tokens:
            return
        if self._prefills(draft):
            before = len(draft.running)
            while draft.tokens < self.batch:
                placed = draft.tokens
                yield Admissions(rows=1, whole=True)
                if draft.tokens == placed:
                    break
            if draft.tokens:
                self._foresee(self._usage[draft.rank], list(draft.running)[before:], draft.spec.block_size)
                return
        self._usage.pop(draft.rank, None)
        yield Decodes(self._share(draft))

    def _share(self, draft: Draft) -> int:
        decodes, stages = running_decodes(draft), draft.spec.stages
        return max(decodes // stages + (draft.ordinal % stages < decodes % stages), 1)

    def _prefills(self, draft: Draft) -> bool:
        """Whether this rank is in its prefill phase, or goes into it."""
        if not draft.waiting or draft.seats < 1:
            return False
        if draft.rank in self._usage:
            return max(self._usage[draft.rank]) < self.full * draft.spec.blocks
        decodes = running_decodes(draft)
        if decodes and (draft.ordinal % draft.spec.stages or not self._pays(draft, decodes)):
            return False
        self._usage[draft.rank] = self._foresee([0] * len(HORIZONS), draft.running, draft.spec.block_size)
        return True

    def _pays(self, draft: Draft, decodes: int) -> bool:
        """Whether a prefill phase would use more of the devices than these decodes do."""
        stages, blocks, size = draft.spec.stages, draft.spec.blocks, draft.spec.block_size
        if (now := self.intensity(decodes // stages)) >= 1:
            return False
        usage = self._foresee([0] * len(HORIZONS), draft.running, size)
        total, longest = 0.0, 0.0
        for sequence in draft.waiting:
            if max(usage) >= blocks:
                break
            self._foresee(usage, (sequence,), size)
            seconds = self.seconds(sequence.remaining)
            total, longest, decodes = total + seconds, max(longest, seconds), decodes + 1
        total += longest * (stages - 1)
        bubble = (longest - self.seconds(decodes // stages)) * (stages - 1)
        return total > 0 and now < (total - bubble) / total

    def intensity(self, decodes: int) -> float:
        """Share of a device that a micro-batch of so many decodes uses."""
        return 1.0 if decodes >= self.batch else decodes / self.seconds(decodes) / (256 / self.seconds(256))

    def seconds(self, tokens: int) -> float:
        """That so many tokens take on all stages, one after another."""
        return max(self.floor, self.per_token * tokens)

    def _foresee(self, usage: list[int], sequences: Iterable[Sequence], size: int) -> list[int]:
        """Add to the blocks in use at each horizon what these sequences will have by then."""
        counts, blocks = [0] * (len(HORIZONS) + 1), [0] * (len(HORIZONS) + 1)
        predictor = self.predictor
        for sequence in sequences:
            reached = bisect_right(HORIZONS, predictor(sequence.request) - sequence.promised)
            counts[reached] += 1
            blocks[reached] -= -sequence.length // size
        alive, held = 0, 0
        for place in reversed(range(len(HORIZONS))):
            alive, held = alive + counts[place + 1], held + blocks[place + 1]
            usage[place] += held - alive * (-HORIZONS[place] // size)
        return usage

    def steady(self, draft: Draft) -> int:
        return max(len(draft.running) // draft.spec.stages, 1)
