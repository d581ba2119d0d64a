"""How fast the lanes of one device go while several of them are busy: laws of contention.

A law knows what each lane asks of the device, not what it computes. Every law lets a lane that is alone go at full
speed, and none lets lanes together do what the device cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Demand(NamedTuple):
    """One lane's job: its name, and what share of the device's arithmetic and bandwidth it takes at full speed."""

    lane: str
    compute: float = 1.0
    memory: float = 1.0


class Law(Protocol):
    def speeds(self, busy: Sequence[Demand]) -> Sequence[float]:
        """Share of its full speed at which each of two or more busy lanes goes, in (0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class Gain:
    """`n` busy lanes each go at (1 + gain (n - 1)) / n of full speed, whatever they do.

    0: they take turns and nothing is won. 1: they do not feel each other; two lanes of g and c seconds then take
    max(g, c) instead of g + c, the most that overlap can win.
    """

    gain: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gain <= 1:
            raise ValueError(f"backend.contention.gain={self.gain} must lie in [0, 1]")

    def speeds(self, busy: Sequence[Demand]) -> Sequence[float]:
        count = len(busy)
        return [(1 + self.gain * (count - 1)) / count] * count


TURNS, APART = Gain(), Gain(1.0)
"""Nothing is won by lanes; lanes that do not feel one another."""


@dataclass(frozen=True, slots=True)
class Demands:
    """Lanes share arithmetic and bandwidth, and feel each other only where they ask for more than there is.

    All go at 1 / max(1, sum of compute shares, sum of memory shares) / (1 + interference (n - 1)). A lane's share is
    the time that its FLOPs (bytes) take at the rate that good kernels reach, over the time that it takes alone.
    Kernels that need different resources run beside each other, those that need the same do not (Orion, EuroSys'24;
    NanoFlow, OSDI'25). `interference`: what each further lane costs the others beyond that (caches, schedulers).
    """

    interference: float = 0.0

    def __post_init__(self) -> None:
        if not self.interference >= 0:
            raise ValueError(f"backend.contention.interference={self.interference} must be 0 or more")

    def speeds(self, busy: Sequence[Demand]) -> Sequence[float]:
        asked = max(1.0, sum([one.compute for one in busy]), sum([one.memory for one in busy]))
        return [1 / asked / (1 + self.interference * (len(busy) - 1))] * len(busy)


@dataclass(frozen=True, slots=True)
class Partition:
    """Each lane has SMs of its own while others are busy, and all of them when it is alone.

    With share s of the SMs a lane of compute share c and memory share m goes at 1 / max(1, c / s, m / min(1, s /
    saturation)): arithmetic goes with the SMs, bandwidth is had whole by `saturation` of them (diminishing returns:
    Nexus, arXiv 2507.06608). If all lanes together then still ask for more bandwidth than there is, each is slowed
    in proportion. `share` goes to `lane`, the others have equal parts of the rest (MuxServe, ICML'24, by MPS; Nexus,
    Bullet by green contexts; here they switch at no cost).
    """

    lane: str = "prefill"
    share: float = 0.5
    saturation: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"backend.contention.share={self.share} must lie between 0 and 1")
        if not 0 < self.saturation <= 1:
            raise ValueError(f"backend.contention.saturation={self.saturation} must lie in (0, 1]")

    def speeds(self, busy: Sequence[Demand]) -> Sequence[float]:
        alone = [self._on(self._sms(one, busy), one) for one in busy]
        crowd = max(1.0, sum([one.memory * speed for one, speed in zip(busy, alone, strict=True)]))
        return [speed / crowd for speed in alone]

    def _sms(self, one: Demand, busy: Sequence[Demand]) -> float:
        """Of a lane, as a share of all."""
        if not any(other.lane == self.lane for other in busy):
            return 1 / len(busy)
        return self.share if one.lane == self.lane else (1 - self.share) / (len(busy) - 1)

    def _on(self, sms: float, one: Demand) -> float:
        return 1 / max(1.0, one.compute / sms, one.memory / min(1.0, sms / self.saturation))
