"""Which steps are timed so that a cost model can tell all others: the design of a calibration.

Every cost is varied where it stands alone: rows and contexts of decodes, lengths and histories of chunks, how many
chunks there are and how many of them sample, unlike contexts, small steps that graphs pad. Then come random mixtures,
which nothing is fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import NamedTuple

from playground.core import Spec
from playground.graphs import CHUNKS, PREFILL_SIZES, decode_sizes, mixed_sizes
from playground.sim.cost.surface import RAGGED as BEYOND

LEAST_CONTEXT = 15
"""Tokens before a decode that is to read next to nothing: with its own, one block."""
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 72, 96, 128, 136, 192, 256, 264, 384, 512)
"""Kernels may be cut otherwise beyond each power of two: there are some on both sides."""
SHORT = 251
CONTEXTS = (SHORT, 1019, 2043, 4091, 16379, 32763)
RAGGED = (84, SHORT, 1019, 8187)
"""On average, of batches whose contexts are evenly spread by order of magnitude, up to three times the average."""
HISTORIES = (1024, 4096, 8192, 16384, 30720)
CHUNK_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
# fmt: off
PROMPTS = (2, 8, 16, 32, 64, 72, 128, 136, 192, 200, 256, 264, 320, 384, 392, 512, 520, 640, 768, 776, 1024, 1032, 1280,
           1536, 1544, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# fmt: on
"""A few tokens beyond a multiple of 64 and of 128 kernels may begin another tile."""
MANY_CHUNKS = (
    (17, 2),
    (32, 4),
    (64, 4),
    (128, 2),
    (4, 256),
    (16, 64),
    (16, 32),
    (32, 32),
    (64, 32),
    (64, 128),
    (16, 256),
)
COPIES = (1, 8, 64, 256, 1024)
LONGEST = 1 + BEYOND
MOST_TOKENS = 1 << 19
"""Of all contexts of a step: beyond, attention takes as long a token as it does there."""
RANDOM = 72
"""Steps that are held out."""
REPEATS = 4
"""Of steps with decodes: the first one finds a device that has waited and tells nothing."""
MOST_NAMED = 4
"""Groups that a name spells out."""


class Group(NamedTuple):
    """So many equal slices; `samples`: the next token of each is wanted."""

    copies: int
    start: int
    length: int
    samples: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """One step to time: slices, or blocks to copy to the host and back."""

    family: str
    groups: tuple[Group, ...] = ()
    copied_blocks: int = 0

    @property
    def name(self) -> str:
        """Unlike that of any other step of a design."""
        if len(self.groups) > MOST_NAMED:
            return f"{self.family} {sha256(repr(self.groups).encode()).hexdigest()[:12]}"
        parts = [f"{g.copies}x{g.start}+{g.length}{'' if g.samples else '-'}" for g in self.groups]
        return " ".join([self.family, *parts, *([f"{self.copied_blocks}b"] if self.copied_blocks else [])])

    @property
    def tokens(self) -> int:
        return sum(group.copies * group.length for group in self.groups)

    @property
    def sequences(self) -> int:
        return sum(group.copies for group in self.groups)

    @property
    def repeats(self) -> int:
        """How often it is done in a row, its decodes going on: a device that had to wait is slower."""
        return REPEATS if any(group.length == 1 for group in self.groups) else 1

    def blocks(self, block_size: int) -> int:
        """That its sequences hold in the end."""
        return sum(group.copies * -(-self.end(group) // block_size) for group in self.groups)

    def end(self, group: Group) -> int:
        """Tokens of each of a group's sequences in the end."""
        return group.start + group.length + (self.repeats - 1) * (group.length == 1)


def decodes(count: int, start: int) -> Group:
    return Group(count, start, 1)


def design(spec: Spec, graphs: bool, seed: int = 0, most_context: int = 32768) -> list[Probe]:
    """All steps of a calibration that this backend can do, most of them of `most_context` tokens a sequence at most."""
    probes = [*_decodes(spec, graphs), *_contexts(spec, most_context), *_ragged(spec), *_uneven(spec, most_context)]
    probes += [*_prompts(spec), *_histories(spec, most_context), *_chunks(spec), *_beside(spec, graphs), *_copies(spec)]
    probes += [*_random(spec, Random(seed), most_context)]
    return list({probe.name: probe for probe in probes if _possible(probe, spec, most_context)}.values())


class Ramp(NamedTuple):
    """Probes one after another, begun on a device that has rested: what heat and clocks make of them."""

    name: str
    probes: tuple[Probe, ...]


def ramps(spec: Spec, most_context: int = 32768) -> list[Ramp]:
    """Prompts without a pause, prompts among decodes, and small chunks beside decodes."""
    rows = min(64, spec.max_seqs - 1)
    prompt = Probe("ramp", (Group(1, 0, min(2048, spec.max_tokens, spec.max_length - 1)),))
    reading = Probe("ramp", (decodes(rows, 511),))
    beside = Probe("ramp", (decodes(rows, 511), Group(1, 0, 447)))
    found = [
        Ramp("prompts", (prompt,) * 48),
        Ramp("turns", ((prompt,) + (reading,) * 3) * 12),
        Ramp("chunks", (beside,) * 40),
    ]
    return [ramp for ramp in found if all(_possible(probe, spec, most_context) for probe in ramp.probes)]


def _possible(probe: Probe, spec: Spec, most_context: int) -> bool:
    longest = max(map(probe.end, probe.groups), default=0)
    return (
        probe.tokens <= spec.max_tokens
        and probe.sequences <= spec.max_seqs
        and longest <= min(spec.max_length - 1, most_context)
        and probe.blocks(spec.block_size) <= min(spec.blocks, MOST_TOKENS // spec.block_size)
    )


def _decodes(spec: Spec, graphs: bool) -> Iterator[Probe]:
    sizes = decode_sizes(spec.max_seqs)
    for rows in sizes if graphs else [size for size in (*ROWS, spec.max_seqs) if size <= spec.max_seqs]:
        yield Probe("decode", (decodes(rows, LEAST_CONTEXT),))


def _contexts(spec: Spec, most_context: int) -> Iterator[Probe]:
    for rows in dict.fromkeys([size for size in (*ROWS, spec.max_seqs) if size <= spec.max_seqs]):
        for context in CONTEXTS:
            yield Probe("context", (decodes(rows, context),))
    # As many keys as the pool holds, so that no step of a run lies beyond.
    room = min(spec.blocks, MOST_TOKENS // spec.block_size) // spec.max_seqs * spec.block_size
    fullest = min(room, most_context, spec.max_length - 1) - REPEATS
    if fullest > LEAST_CONTEXT:
        yield Probe("context", (decodes(spec.max_seqs, fullest),))


def _ragged(spec: Spec) -> Iterator[Probe]:
    """Contexts that differ, as they do when one serves."""
    for rows in dict.fromkeys([size for size in (*ROWS[1:], spec.max_seqs) if 1 < size <= spec.max_seqs]):
        for context in RAGGED:
            yield Probe("ragged", tuple(decodes(1, start) for start in spread(rows, context)))


def spread(rows: int, mean: int) -> list[int]:
    """So many contexts of that mean, each so many times the one before that the longest is `LONGEST` times the mean.

    Of few rows the longest is as long as they allow: almost all of what there is.
    """
    most = min(LONGEST, 0.95 * rows)
    low, high = 1.0, 1e6
    for _ in range(60):  # the longer the tail, the less the mean is of the longest
        ratio = (low * high) ** 0.5
        shares = [ratio ** (-row / (rows - 1)) for row in range(rows)]
        low, high = (ratio, high) if rows / sum(shares) < most else (low, ratio)
    return sorted(round(mean * rows * share / sum(shares)) for share in shares)


def _uneven(spec: Spec, most_context: int) -> Iterator[Probe]:
    """One long context among short ones: a kernel may have to wait for it."""
    most = min(most_context, spec.max_length - 1) - REPEATS
    for rows in dict.fromkeys(min(rows, spec.max_seqs) for rows in (8, 32, 128)):
        for context in dict.fromkeys(min(context, most) for context in (4091, 16379, 32763)):
            if rows > 1 and context > 2 * SHORT:
                yield Probe("uneven", (decodes(1, context), decodes(rows - 1, SHORT)))


def _prompts(spec: Spec) -> Iterator[Probe]:
    for length in dict.fromkeys((*PROMPTS, spec.max_tokens)):
        yield Probe("prompt", (Group(1, 0, length),))


def _histories(spec: Spec, most_context: int) -> Iterator[Probe]:
    for length in CHUNK_LENGTHS:
        for history in HISTORIES:
            yield Probe("history", (Group(1, history, length),))
    room = min(most_context, spec.max_length - 1, spec.blocks * spec.block_size)
    if room > spec.max_tokens:
        yield Probe("history", (Group(1, room - spec.max_tokens, spec.max_tokens),))


def _chunks(spec: Spec) -> Iterator[Probe]:
    for count, length in MANY_CHUNKS:
        yield Probe("chunks", (Group(count, 0, length),))
        yield Probe("chunks", (Group(count, 0, length, False),))
    for count, length in ((4, 256), (16, 64), (8, 512)):
        yield Probe("chunks", (Group(count, 2048, length),))


def _beside(spec: Spec, graphs: bool) -> Iterator[Probe]:
    """Decodes beside chunks: every size of a graph, and larger ones."""
    for rows in mixed_sizes(spec.max_seqs):
        for size in PREFILL_SIZES if graphs else ():
            yield Probe("mixed", (decodes(min(rows, spec.max_seqs - 1), LEAST_CONTEXT), Group(1, 0, size - 1)))
    for rows in (16, 64, 128, min(256, spec.max_seqs) - 1):
        for context in (511, 2047):
            for length, history in (
                (63, 0),
                (255, 0),
                (511, 0),
                (255, 2048),
                (1024, 0),
                (2048, 0),
                (1024, 4096),
                (4096, 0),
            ):
                yield Probe("mixed", (decodes(rows, context), Group(1, history, length)))
    for rows in (32, 128):
        yield Probe("mixed", (decodes(rows, 511), Group(CHUNKS, 0, 32)))
        yield Probe("mixed", (decodes(rows, 511), Group(8, 0, 256)))
        yield Probe("mixed", (decodes(rows, 511), Group(2 * CHUNKS, 0, 32)))


def _copies(spec: Spec) -> Iterator[Probe]:
    for blocks in COPIES:
        if blocks <= min(spec.host_blocks, spec.blocks):
            yield Probe("copy", copied_blocks=blocks)


def _random(spec: Spec, random: Random, most_context: int) -> Iterator[Probe]:
    """Mixtures as servers have them: many decodes of unlike contexts, a few chunks of any length and history."""
    most = min(most_context, spec.max_length) - 1
    for _ in range(RANDOM):
        rows, chunks = random.choice((0, by_magnitude(random, 1, spec.max_seqs))), random.choice((0, 1, 1, 2, 4))
        chunks = chunks if rows else max(chunks, 1)
        rows = min(rows, spec.max_seqs - chunks)
        typical = by_magnitude(random, 32, most // 4)
        groups = [decodes(1, min(by_magnitude(random, typical // 4 + 1, typical * 4), most)) for _ in range(rows)]
        left = spec.max_tokens - rows
        for _ in range(chunks):
            length = min(by_magnitude(random, 16, min(4096, most)), left)
            if length >= 2:
                groups.append(Group(1, random.choice((0, 0, by_magnitude(random, 16, most - length or 1))), length))
                left -= length
        yield Probe("random", _fitting(groups, spec))


def _fitting(groups: Sequence[Group], spec: Spec) -> tuple[Group, ...]:
    """As many as the pool holds."""
    chosen, left = [], min(spec.blocks, MOST_TOKENS // spec.block_size)
    for group in groups:
        left -= -(-(group.start + group.length) // spec.block_size)
        if left < 0:
            break
        chosen.append(group)
    return tuple(chosen)


def by_magnitude(random: Random, low: int, high: int) -> int:
    """Evenly by order of magnitude."""
    share: float = random.random()
    found: float = low * (max(high, low) / low) ** share
    return round(found)
