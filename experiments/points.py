"""The folder of a sweep: which points it has, which of them are finished, and that no two sweeps share it.

Knows names of files, not what a point computes. A point is finished when `finished.json` stands in its folder, which is
the last thing written there: whatever else is in a folder without it may be half of something, and is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from experiments import provenance
from experiments.settings import SettingError

MANIFEST = "points.json"
FINISHED = "finished.json"
PROBLEM = "error.txt"
"""In the folder of a run that could not be: why, in one line; of a bug with its frames."""
LOCK = ".lock"
PATIENCE = 3.0
"""Seconds that the processes of a sweep which was killed may need to notice."""

Point = Sequence[str]
"""The overrides that make it, as on the command line."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A point that is over: the digest of its configuration, and the revision of the code that served it."""

    number: int
    folder: Path
    config: str
    revision: Any


@contextmanager
def claim(folder: Path, points: Sequence[Point], command: Sequence[str]) -> Iterator[None]:
    """Begin the sweep in this folder or go on with it; refused where the folder is another's."""
    with _locked(folder):
        if not (folder / MANIFEST).exists():
            _check_empty(folder)
            manifest = {"command": list(command), "cwd": os.getcwd(), "points": [list(point) for point in points]}
            provenance.write(folder / MANIFEST, manifest)
        elif read(folder)["points"] != [list(point) for point in points]:
            raise SettingError(
                f"run_dir={folder} holds another sweep ({_told(read(folder)['command'])}): choose another folder, "
                "or repeat that command to go on with it"
            )
        yield


def read(folder: Path) -> dict[str, Any]:
    """The sweep's `command` (arguments), `cwd` and `points`."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{folder}: holds no sweep (no {MANIFEST}: {error.strerror})") from error
    assert isinstance(content, dict)
    return content


def finished(folder: Path) -> dict[int, Finished]:
    """Points that need not run again, by number."""
    found = {}
    for file in sorted(folder.rglob(FINISHED)):
        try:
            note = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # a machine that went down in that moment
            continue
        found[note["point"]] = Finished(note["point"], file.parent, note["config"], note["revision"])
    return found


def finish(folder: Path, number: int, config: str) -> None:
    """Mark the point in this folder as finished, once all that it wrote is on the disk."""
    for path in folder.iterdir():
        if path.is_file():
            _sync(path)
    note = {"point": number, "config": config, "revision": provenance.revision()}
    provenance.write(folder / FINISHED, note)


def labels(batch: Sequence[Point]) -> list[dict[str, str]]:
    """What distinguishes each point: overrides that all share distinguish none."""
    given = [dict(override.lstrip("+~").partition("=")[::2] for override in point) for point in batch]
    varied = {key for one in given for key in one if len({other.get(key) for other in given}) > 1}
    return [{key: value for key, value in one.items() if key in varied} for one in given]


def name(labels: Mapping[str, str]) -> str:
    """`policy=orca workload.rate=2`"""
    return " ".join(f"{key}={value}" for key, value in labels.items()) or "job"


def title(labels: Mapping[str, str]) -> str:
    """The same for a display, where room is short: `policy=orca rate=2`"""
    return name({key.rpartition(".")[2]: value for key, value in labels.items()})


def digest(config: str) -> str:
    """Of a configuration as YAML: two points are the same if these are."""
    return hashlib.sha256(config.encode()).hexdigest()


def fail(folder: Path, point: Point, problem: str) -> None:
    """Say in this folder why the point could not be, where the job itself cannot."""
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(point)), encoding="utf-8")  # JSON is YAML
    (folder / PROBLEM).write_text(f"{problem}\n", encoding="utf-8")


def problem(folder: Path) -> str:
    """Why the point in this folder could not be, in one line."""
    file = folder / PROBLEM
    return file.read_text(encoding="utf-8").partition("\n")[0] if file.exists() else f"nothing in {folder} says why"


def clear(folder: Path, sweep: Path) -> None:
    """Remove what a point left half-done. Only what a job of a sweep made, and only inside of this sweep."""
    if sweep.resolve() in folder.resolve().parents and (folder / ".hydra").is_dir():
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Held by the process and its children, and given back by the system however they end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise SettingError(f"run_dir={folder}: {error.strerror}; choose a folder that you may write to") from error
    with file:
        until = monotonic() + PATIENCE
        while not _try_lock(file.fileno()):
            if monotonic() > until:
                raise SettingError(f"run_dir={folder}: a sweep is running in it; wait for it or choose another folder")
            sleep(0.05)
        yield


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_empty(folder: Path) -> None:
    if next(folder.glob("*/.hydra"), None) or next(folder.glob("*/run.json"), None) or (folder / "run.json").exists():
        raise SettingError(f"run_dir={folder} holds other runs: choose another folder, or delete that one")


def _told(command: Sequence[str]) -> str:
    told = " ".join(command)
    return told if len(told) <= 200 else f"{told[:200]}..."


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
