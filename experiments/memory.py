"""How many processes memory holds: what is free, and what those that ran have taken. Knows processes, not tasks.

On Linux, from /proc and the container's own limit. Elsewhere nothing is known, and everything fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
MIB = 1 << 20


class Room(Protocol):
    """What a pool asks before it starts a process beside those that run."""

    need: int

    def fits(self, running: Iterable[int]) -> bool:
        """Whether one more does, beside these (process ids, one at least), which may still grow."""
        ...

    def learn(self, process: int) -> None:
        """Its task is over: what it has taken, others may."""
        ...


class Measured:
    """Room by measurement. `need`: bytes that a process takes, the most of any so far; at first what this one holds,
    which has imported what they will."""

    def __init__(self) -> None:
        self.need = _status("self").get("VmRSS", 0)
        self._known = False

    def fits(self, running: Iterable[int]) -> bool:
        free = available()
        if free is None:
            return True
        held = [own(process) for process in running]
        self.need = max(self.need, *held)
        return free - sum(self.need - taken for taken in held) >= self.need

    def learn(self, process: int) -> None:
        taken = most_own(process)
        self.need = max(self.need, taken) if self._known else taken or self.need
        self._known = self._known or taken > 0


def available() -> int | None:
    """Bytes that processes may still take without swapping; None where nobody says."""
    free = _numbers(PROC / "meminfo").get("MemAvailable")
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None:
        return free
    # The cache of files that were read counts as used, but gives way.
    left = limit - used + _numbers(CGROUP / "memory.stat", 1).get("inactive_file", 0)
    return left if free is None else min(left, free)


def own(process: int) -> int:
    """Bytes that nobody shares with it, in particular not who forked it; 0 of one that is gone."""
    rollup = _numbers(PROC / str(process) / "smaps_rollup")
    return sum(rollup.get(name, 0) for name in ("Private_Clean", "Private_Dirty"))


def most_own(process: int) -> int:
    """The most of that that it ever held, about: what it shares now it has shared then."""
    status, mine = _status(str(process)), own(process)
    return mine and mine + status.get("VmHWM", 0) - status.get("VmRSS", 0)


def _status(process: str) -> Mapping[str, int]:
    return _numbers(PROC / process / "status")


def _numbers(file: Path, unit: int = 1 << 10) -> dict[str, int]:
    """`Name: 12 kB` line by line, in bytes; what is no number is left out."""
    found = {}
    for line in _text(file).splitlines():
        name, _, value = line.replace(":", " ", 1).partition(" ")
        if (words := value.split()) and words[0].isdigit():
            found[name] = int(words[0]) * unit
    return found


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
