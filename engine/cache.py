"""Where checkpoints that the playground makes itself are kept, and how they get there in one piece."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "PLAYGROUND_CACHE"


def cache_root() -> Path:
    """`$PLAYGROUND_CACHE`, or ~/.cache/playground."""
    stated = os.environ.get(VARIABLE)
    return Path(stated) if stated else Path.home() / ".cache" / "playground"


def prepared(name: str, make: Callable[[Path], None], root: Path | None = None) -> Path:
    """The folder `name` of the cache, made by `make(folder)` if it is not there.

    It appears whole or not at all, so others may prepare it at the same time: the first one to finish wins.
    """
    target = (root or cache_root()) / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        make(draft)
        draft.chmod(0o755)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # else somebody else was faster, with the same content
            raise
