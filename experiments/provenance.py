"""Where a run comes from: versions, machine, revision. Facts for `run.json`; nothing here changes a run."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from playground import trace

PACKAGES = ("serving-playground", "numpy", "pyarrow", "simpy", "hydra-core", "torch", "triton", "transformers")


def facts() -> dict[str, Any]:
    """Read from metadata: asking for torch's version must not import it."""
    return {
        "trace_version": trace.VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "revision": revision(),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all: a killed run leaves no half file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.rename(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def revision() -> dict[str, Any] | None:
    """Commit, and whether files differ from it; None outside a checkout. As it was when first asked: code once loaded
    stays as it is."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
