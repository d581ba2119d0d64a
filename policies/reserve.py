"""Admission that keeps room for a share of what running sequences may still sample, and learns how much it takes.

The share falls from step to step and rises when somebody had to give way. It knows no true length: `max_tokens` bounds
what may come, so that with a workload whose clients ask for just what they get it is partly an oracle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from playground.draft import Draft
from playground.sequence import Sequence


@dataclass(slots=True)
class Share:
    """A share of each rank that falls by `slope` a step from where it was set, down to `floor`."""

    slope: float
    floor: float
    _set: dict[int, tuple[float, int]] = field(default_factory=dict)
    """(value, in which step) by rank."""

    def set(self, draft: Draft, value: float) -> float:
        self._set[draft.rank] = value, draft.ordinal
        return value

    def at(self, draft: Draft, first: float) -> float:
        """In this step; `first` if it was never set."""
        # By steps since, not by how often it is asked: nobody asks during a quiet stretch.
        value, since = self._set.get(draft.rank) or (self.set(draft, first), draft.ordinal)
        return max(self.floor, value - self.slope * (draft.ordinal - since))


@dataclass(frozen=True, slots=True)
class NewTokenRatio:
    """When it fits, to its end, beside the prompts admitted and a share of what everybody running may still sample.

    In tokens, with F free and ratio r: F - r Σ min(left, clip) > prompt + min(its left, clip), where `left` are the
    tokens that may still be sampled; whoever is being prefilled counts with r = 1. The ratio starts at
    `init` x `conservativeness` (at most 1), falls to `floor` of that within `decay_steps` steps, and is at a preemption
    what the sequences left have sampled, and `lookahead` more tokens each, of all that they may sample (at most 1). An
    idle rank starts anew.
    Source: SGLang, `PrefillAdder` and `retract_decode` (server arguments of 2025: 0.7, 0.14, 600, clip 4096, 20
    tokens), re-read in the main branch of 2026. Not taken over: giving up memory for `lookahead` steps at once. There
    it goes with `budget=sglang` and `victims=least_progress`.
    """

    conservativeness: float = 1.0
    init: float = 0.7
    floor: float = 0.14
    decay_steps: int = 600
    clip: int = 4096
    lookahead: int = 20
    _share: Share = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("init", "floor"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"policy.admission.{name}={value} must lie in (0, 1]")
        if not self.conservativeness > 0:
            raise ValueError(f"policy.admission.conservativeness={self.conservativeness} must be above 0; 1 is usual")
        for name in ("decay_steps", "clip"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"policy.admission.{name}={value} must be at least 1")
        if self.lookahead < 0:
            raise ValueError(f"policy.admission.lookahead={self.lookahead} must be 0 or more tokens")
        least = self._first * self.floor
        object.__setattr__(self, "_share", Share((self._first - least) / self.decay_steps, least))

    @property
    def _first(self) -> float:
        return min(1.0, self.init * self.conservativeness)

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        ratio = self.ratio(draft)
        free = draft.blocks_free - draft.blocks_needed(sequence, sequence.remaining)
        room = free * draft.spec.block_size - min(sequence.max_tokens - sequence.promised, self.clip)
        if room <= 0:  # whoever runs: most of a full rank's answers
            return False
        room -= draft.blocks_owed * draft.spec.block_size
        clip, ordinal = self.clip, draft.ordinal
        decoding, prefilled = 0, 0
        for other in draft.running:
            left = other.max_tokens - other.promised
            left = clip if left > clip else left
            if other.promised > 1 or (other.promised and other.step != ordinal):
                decoding += left
            else:
                prefilled += left
        return room - prefilled > ratio * decoding

    def ratio(self, draft: Draft) -> float:
        """Of this step."""
        return self._share.at(draft, self._first) if draft.running else self._share.set(draft, self._first)

    def preempted(self, draft: Draft) -> None:
        running = draft.running
        sampled = sum([sequence.promised for sequence in running]) + self.lookahead * len(running)
        most = sum([sequence.max_tokens for sequence in running])
        self._share.set(draft, min(1.0, sampled / (most + 1)) if running else self._first)


@dataclass(frozen=True, slots=True)
class DecodeReserve:
    """When its first chunk leaves the blocks that a share of what decodes may still sample would take.

    reserve = Σ over decodes of ceil((int(ratio x left) - room in its last block) / block size), at least one block a
    pipeline stage. The ratio starts at `init`, rises by `rise` with every step that preempts, however many (at most to
    1), and falls by `fall` a step, down to `floor`. Prompts that are being computed reserve nothing.
    Source: gLLM main (`c7dc791`, June 2026: `new_token_ratio` 0.7, 0.1, +0.05 once a `check_preempt`, -0.002), where
    the same reserve bounds the prefill tokens of a step; here chunks of admitted prompts go on.
    """

    init: float = 0.7
    floor: float = 0.1
    rise: float = 0.05
    fall: float = 0.002
    _share: Share = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("init", "floor"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"policy.admission.{name}={value} must lie in [0, 1]")
        for name in ("rise", "fall"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"policy.admission.{name}={value} must be 0 (never) or more")
        object.__setattr__(self, "_share", Share(self.fall, self.floor))

    def __call__(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        cached = draft.prefix_hit(sequence) if sequence.launched == 0 else 0
        left = draft.blocks_free - draft.blocks_needed(sequence, cached + tokens)
        return left >= self.reserve(draft)

    def ratio(self, draft: Draft) -> float:
        """Of this step."""
        return self._share.at(draft, self.init)

    def reserve(self, draft: Draft) -> int:
        """Blocks, of this step."""
        return max(draft.spec.stages, reserved_blocks(draft.running, self.ratio(draft), draft.spec.block_size))

    def preempted(self, draft: Draft) -> None:
        self._share.set(draft, min(1.0, self.ratio(draft) + self.rise))


def reserved_blocks(running: Iterable[Sequence], ratio: float, size: int) -> int:
    """Blocks of `size` tokens that decodes take beyond those they have, if each samples `ratio` of what it may."""
    reserve = 0
    for sequence in running:
        if sequence.promised:
            more = int(ratio * (sequence.max_tokens - sequence.promised))
            more -= len(sequence.blocks) * size - sequence.launched
            if more > 0:
                reserve += -(-more // size)
    return reserve
