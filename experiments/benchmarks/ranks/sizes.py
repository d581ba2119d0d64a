"""How large everything is that is measured: as docs have it, and tiny."""

from __future__ import annotations

from dataclasses import dataclass

from playground.core import Request


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of sequences, tokens and layers. `tiny`: of every model's shape only its kind is kept."""

    tiny: bool
    rows: int
    """Sequences of a decode step."""
    context: int
    steps: int
    """That are timed."""
    crowd: int
    """Sequences in flight on one GPU, and of a micro-batch."""
    prompt: int
    output: int
    window: float
    """Seconds for which a crowd is watched."""
    splits: tuple[tuple[int, ...], ...]
    """Layers of two stages."""
    conversations: int
    rate: float
    """Conversations that arrive a second."""
    longest: int
    """Tokens of a conversation."""
    exact_layers: int
    """Of the mixture in float32."""
    layers: int
    """Of the mixture in bf16."""
    mixed_crowd: int
    prompts: tuple[int, int]
    """So many of so many tokens are a prefill step."""
    rounds: int
    sequence: int
    """Longest that a backend has room for."""

    def request(self, id: int, output: int) -> Request:
        """Of a crowd."""
        return Request(id, 0.0, self.prompt, output, output)


FULL = Sizes(
    tiny=False,
    rows=32,
    context=1024,
    steps=64,
    crowd=256,
    prompt=512,
    output=256,
    window=8.0,
    splits=((18, 18), (19, 17), (20, 16)),
    conversations=400,
    rate=20.0,
    longest=16000,
    exact_layers=4,
    layers=24,
    mixed_crowd=128,
    prompts=(8, 1024),
    rounds=5,
    sequence=16384,
)
TINY = Sizes(
    tiny=True,
    rows=4,
    context=32,
    steps=24,
    crowd=4,
    prompt=16,
    output=8,
    window=0.3,
    splits=((2, 2), (3, 1)),
    conversations=6,
    rate=50.0,
    longest=200,
    exact_layers=2,
    layers=2,
    mixed_crowd=3,
    prompts=(4, 16),
    rounds=2,
    sequence=512,
)
