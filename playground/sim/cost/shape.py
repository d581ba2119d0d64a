"""What a cost model needs to know of a step: counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from playground.core import Columns, Slice

_new = tuple.__new__
"""`_replace` at a fifth of its cost: simulated decodes tick millions of times."""


class Contexts:
    """Keys that each decode reads, the new one included: worked out where a window asks for them.

    Decodes tick millions of times, so that one number grows and not all of them.
    """

    __slots__ = ("_grown", "_starts")

    def __init__(self, starts: Sequence[int], grown: int = 1) -> None:
        self._starts = starts
        self._grown = grown

    def __iter__(self) -> Iterator[int]:
        return (start + self._grown for start in self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contexts) and [*self] == [*other]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Contexts({[*self]})"

    def later(self, ticks: int) -> Contexts:
        return Contexts(self._starts, self._grown + ticks)

    def within(self, window: int) -> int:
        """The sum of what each reads of `window` keys at most."""
        starts, most = self._starts, window - self._grown
        if not starts or min(starts) >= most:  # what long answers and small windows come to
            return len(starts) * window
        return sum([start if start < most else most for start in starts]) + len(starts) * self._grown


class Shape(NamedTuple):
    """The slices of one rank in one step, as counts. A slice of one token is a decode, any other a prefill."""

    tokens: int
    sequences: int
    sampled: int
    decodes: int
    decode_context: int
    """Keys that all decodes read, the new ones included."""
    decode_longest: int
    """Keys of the longest decode."""
    prefill_pairs: int
    """(query, key) pairs under the causal mask: a chunk of n after s tokens has n*s + n*(n+1)/2."""
    prefill_context: int
    """Keys that all prefills read, each chunk reading its whole prefix once."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(tokens before it, tokens) of each prefill, for models that look at each; `prefill_pairs` sums them up."""
    contexts: Contexts | None = None
    """Of each decode; `decode_context` sums them up. None: they are taken to be alike."""

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decodes

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Shape:
        """Of slices that run together on one rank. One pass: a simulation comes here at every step."""
        sequences = sampled = decodes = decode_context = decode_longest = 0
        prefill_tokens = prefill_pairs = prefill_context = 0
        chunks: list[tuple[int, int]] = []
        decoding: list[int] = []
        for part in slices:
            start, length = part.start, part.length
            sequences += 1
            sampled += part.samples
            if length == 1:
                decodes += 1
                decode_context += start
                decoding.append(start)
                if start >= decode_longest:
                    decode_longest = start + 1
            else:
                prefill_tokens += length
                prefill_pairs += length * start + (length * (length + 1) >> 1)
                prefill_context += start + length
                chunks.append((start, length))
        return cls(
            prefill_tokens + decodes,
            sequences,
            sampled,
            decodes,
            decode_context + decodes,
            decode_longest,
            prefill_pairs,
            prefill_context,
            tuple(chunks),
            Contexts(decoding),
        )

    @classmethod
    def of_columns(cls, slices: Columns) -> Shape:
        """As `of`: decodes are summed by column, only prefills are looked at one by one."""
        starts, lengths = slices.start, slices.length
        decodes = lengths.count(1)
        chunks: tuple[tuple[int, int], ...] = ()
        decoding: Sequence[int] = starts
        if decodes < len(lengths):
            pairs = list(zip(starts, lengths, strict=True))
            chunks = tuple([pair for pair in pairs if pair[1] != 1])
            decoding = [start for start, length in pairs if length == 1]
        return cls(
            sum(lengths),
            len(lengths),
            slices.samples.count(True),
            decodes,
            sum(decoding) + decodes,
            max(decoding) + 1 if decodes else 0,
            sum([length * start + (length * (length + 1) >> 1) for start, length in chunks]),
            sum([start + length for start, length in chunks]),
            chunks,
            Contexts(decoding),
        )

    def tick(self, ticks: int = 1) -> Shape:
        """The same decodes so many steps later: every context has grown by one token a step."""
        if self.tokens != self.decodes:
            raise ValueError(f"only decodes tick: this shape has {self.prefill_tokens} prefill tokens")
        context, longest = self.decode_context + ticks * self.decodes, self.decode_longest + ticks
        contexts = self.contexts and self.contexts.later(ticks)
        return _new(Shape, (*self[:4], context, longest, *self[6:9], contexts))
