"""Who gives way when memory is short, and how?

Sequences with nothing in flight come first: their blocks are free at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.core import COPY_OUT
from playground.draft import Draft, How
from playground.sequence import Sequence


def candidates(draft: Draft) -> list[Sequence]:
    """Running sequences with nothing in flight, else all running ones."""
    running = draft.running
    return [sequence for sequence in running if not sequence.in_flight] or list(running)


@dataclass(frozen=True, slots=True)
class Cheaper:
    """Swap a victim's KV if that takes less time than computing it again would; seconds, bytes and tokens.

    Out and in again: (blocks already on their way out + 2 x its own) x block size x `token_bytes` / `bandwidth`, and
    `copy` for each of the two copies. Again: n x `recompute` + n² / 2 x `recompute_pair` for n tokens of KV, what the
    prefix cache may still hold of them included. What a recomputation costs the others in the same steps is not in it.
    The defaults are Llama-3.1-8B (BF16) on an H200: 131,072 bytes a token over PCIe 5 at 55 GB/s, 16 GFLOP a token and
    0.52 MFLOP a pair at 60 % of 989 TFLOP/s. There recomputing takes 5.6 times as long, so they always swap; a slow
    link, long copies or a small model turn that around.
    Source: the comparison of PagedAttention (SOSP'23 §7.3, Fig. 19), made for each victim.
    """

    token_bytes: float = 131072.0
    bandwidth: float = 55e9
    copy: float = 0.0
    recompute: float = 2.7e-5
    recompute_pair: float = 8.8e-10

    def __post_init__(self) -> None:
        for name in ("token_bytes", "copy", "recompute", "recompute_pair"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"policy.victims.how.{name}={value} must be 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"policy.victims.how.bandwidth={self.bandwidth} must be above 0 bytes a second")

    def __call__(self, draft: Draft, victim: Sequence) -> How:
        tokens = victim.launched
        again = tokens * self.recompute + tokens * tokens / 2 * self.recompute_pair
        ahead = [len(copy.source) for step in draft.in_flight for copy in step.copies if copy.lane == COPY_OUT]
        ahead += [len(copy.source) for copy in draft.copies if copy.lane == COPY_OUT]
        blocks = sum(ahead) + 2 * draft.spec.blocks_for(tokens)
        swapping = blocks * draft.spec.block_size * self.token_bytes / self.bandwidth + 2 * self.copy
        return How.SWAP if swapping < again else How.RECOMPUTE


Manner = How | Cheaper
"""What becomes of a victim's KV: always the same, or whichever is cheaper."""


def manner(value: Manner | str) -> Manner:
    """As a member: configurations spell it out."""
    if callable(value):
        return value
    try:
        return How(value)
    except ValueError:
        raise ValueError(f"policy.victims.how={value} must be recompute or swap") from None


def how_to_give_way(draft: Draft, victim: Sequence, how: Manner) -> How:
    """What becomes of this victim's KV; computed again where it cannot be swapped."""
    if not draft.can_swap(victim):
        return How.RECOMPUTE
    return how if isinstance(how, How) else how(draft, victim)


@dataclass(frozen=True)
class _Rule:
    """What all rules share."""

    how: Manner = How.RECOMPUTE

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", manner(self.how))


@dataclass(frozen=True)
class LastArrived(_Rule):
    """The youngest request loses its KV. Source: vLLM v0 (SOSP'23 §4.5), Sarathi-Serve.

    vLLM v1 takes the last of its running list, which is another one only after a resumption: there an old request that
    comes back is the next victim again.
    """

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=_age)


@dataclass(frozen=True)
class Largest(_Rule):
    """The one with the most blocks, the youngest among equals. Source: gLLM main (`c7dc791`, June 2026)."""

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda sequence: (len(sequence.blocks), *_age(sequence)))


@dataclass(frozen=True)
class LeastProgress(_Rule):
    """The one with the fewest sampled tokens, among equals that with the longest prompt, then the youngest.

    Source: SGLang, `retract_decode` (sorted by output, then input length; main branch of 2026), which leaves prompts
    in progress alone: here they have no progress and go first.
    """

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda s: (-s.promised, s.request.prompt_length, *_age(s)))


@dataclass(frozen=True)
class LeastRecompute(_Rule):
    """The one with the fewest tokens to compute again (its KV so far), the youngest among equals.

    The opposite of `largest`: it wastes least a victim, but frees least, so that it may take several victims.
    Source: ours; the cost is that of PagedAttention's recomputation (SOSP'23 §4.5).
    """

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda sequence: (-sequence.launched, *_age(sequence)))


@dataclass(frozen=True)
class LowestPriority(_Rule):
    """The one of the lowest priority (the highest number), the youngest among equals.

    The needy one gives way itself if it is that. Source: vLLM v1 with `policy=priority` (2025): max of (priority,
    arrival time).
    """

    def __call__(self, draft: Draft, needy: Sequence) -> Sequence:
        return max(candidates(draft), key=lambda sequence: (sequence.request.priority, *_age(sequence)))


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival, sequence.id
