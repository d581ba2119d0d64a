"""What commands leave beside their words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(file: Path, content: str) -> None:
    """Into a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content, encoding="utf-8")


def write_json(file: Path, content: Any) -> None:
    write(file, json.dumps(content, indent=1) + "\n")
