"""What a draft has placed so far, by field: a decode, of which a step has hundreds, is never an object of its own."""

from __future__ import annotations

from itertools import compress

from playground.core import Columns
from playground.sequence import Sequence


class Placed:
    """Slices of one rank in the making; the fields are those of `Slice`."""

    __slots__ = ("blocks", "drafted", "epoch", "lane", "length", "samples", "sequence", "start")

    def __init__(self) -> None:
        self.sequence: list[int] = []
        self.epoch: list[int] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.samples: list[bool] = []
        self.blocks: list[tuple[int, ...]] = []
        self.lane: list[str] = []
        self.drafted: list[int] = []

    def add(
        self, sequence: Sequence, start: int, length: int, samples: bool, blocks: tuple[int, ...], lane: str
    ) -> None:
        self.sequence.append(sequence.id)
        self.epoch.append(sequence.epoch)
        self.start.append(start)
        self.length.append(length)
        self.samples.append(samples)
        self.blocks.append(blocks)
        self.lane.append(lane)
        self.drafted.append(0)

    def add_decodes(
        self, sequences: list[Sequence], starts: list[int], blocks: dict[int, tuple[int, ...]], lane: str
    ) -> None:
        """One token for each; `blocks` says who brings some, by place among `sequences`."""
        before, count = len(self.sequence), len(sequences)
        self.sequence += [sequence.id for sequence in sequences]
        self.epoch += [sequence.epoch for sequence in sequences]
        self.start += starts
        self.length += [1] * count
        self.samples += [True] * count
        self.blocks += [()] * count
        self.lane += [lane] * count
        self.drafted += [0] * count
        for place, brought in blocks.items():
            self.blocks[before + place] = brought

    def withdraw(self, sequence: int) -> tuple[int, int]:
        """Take back all slices of a sequence: how many tokens, and how many samples, they were of."""
        kept = [id != sequence for id in self.sequence]
        tokens = sum([length for length, stays in zip(self.length, kept, strict=True) if not stays])
        samples = sum([drawn for drawn, stays in zip(self.samples, kept, strict=True) if not stays])
        for name in self.__slots__:
            setattr(self, name, list(compress(getattr(self, name), kept)))
        return tokens, samples

    def columns(self, rank: int) -> Columns:
        return Columns(
            tuple(self.sequence),
            tuple(self.epoch),
            (rank,) * len(self.sequence),
            tuple(self.start),
            tuple(self.length),
            tuple(self.samples),
            tuple(self.blocks),
            tuple(self.lane),
            tuple(self.drafted),
        )
