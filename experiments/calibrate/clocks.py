"""What an NVIDIA GPU's clocks, power and temperature were while something was measured."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
UNITS = ("sm_mhz", "memory_mhz", "celsius", "watts")
EVERY_MS = 250


@contextmanager
def recorded(file: Path, wanted: bool) -> Iterator[None]:
    """Lines of `FIELDS` into `file` meanwhile; nothing where not `wanted` or nvidia-smi is not there."""
    if not wanted:
        yield
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(EVERY_MS)]
    with file.open("a", encoding="utf-8") as lines:
        try:
            process = subprocess.Popen(command, stdout=lines, stderr=subprocess.DEVNULL)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def summary(file: Path) -> dict[str, Any]:
    """Least, median and largest of each field; empty where nothing was recorded."""
    rows = [_numbers(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    columns = list(zip(*[row for row in rows if row is not None], strict=True))
    return {name: [min(values), median(values), max(values)] for name, values in zip(UNITS, columns, strict=False)}


def _numbers(line: str) -> list[float] | None:
    """None for a line that was cut off or says that a figure is not to be had."""
    try:
        values = [float(value) for value in line.split(",")]
    except ValueError:
        return None
    return values if len(values) == len(UNITS) else None
