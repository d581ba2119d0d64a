"""A failing part of a benchmark as a line of its record: whatever was raised, the other parts go on."""

from __future__ import annotations

import traceback
from pathlib import Path


def failure(name: str, error: Exception, longest: int) -> dict[str, str]:
    """The last line that the error says, cut to `longest` characters, and where it was raised."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    place = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {lines[-1].strip()[:longest]}"
    return {"name": name, "error": told, "at": f"{Path(place.filename).name}:{place.lineno}"}
