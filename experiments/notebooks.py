"""Sweeps from Python, for notebooks and scripts: the command line's, with their results as a table.

    from experiments.notebooks import sweep

    runs = sweep({"policy": ["orca", "chunked_prefill"], "workload.rate": [2, 4]}, "runs/rates")
    runs.pivot(index="workload.rate", columns="policy", values="p99_ttft_ms")

The sweep runs in a process of its own, `python -m playground -m ...`, which forks; a notebook is full of threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from signal import SIGINT
from typing import IO

import pandas as pd

from experiments.settings import SettingError

TABLE = "sweep.json"


def sweep(options: Mapping[str, object], folder: str | Path, workers: int | None = None) -> pd.DataFrame:
    """Run every combination of those options that are lists; one row a point.

    `options`: as on the command line; a tuple is one value that is a list (`"parallel.layers": (20, 12)`). `folder`
    holds all points: called again, what is finished there is not run again; other points or settings are refused.
    `workers`: points at a time (None: one a core, as far as memory goes). Columns: `job`, the options that vary, the
    figures of `summary.json` (units in their names), and `error` where points failed. Progress is printed as it comes.

    Raises SettingError, with the command's own words, where there is no table at all; an interrupt ends the sweep, to
    be gone on with.
    """
    given = [f"{name}={_swept(value)}" for name, value in options.items()]
    more = [] if workers is None else [f"hydra.launcher.workers={workers}"]
    command = [sys.executable, "-m", "playground", "-m", *given, f"run_dir={Path(folder).absolute()}", *more]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        last = _carried_out(command, output)
        output.seek(0)
        if not _has_table(output.read()):
            raise SettingError(last.removeprefix("error: ") or "the sweep ended without a word")
    return read(folder)


def read(folder: str | Path) -> pd.DataFrame:
    """The table of a sweep that has ended, however it was started."""
    file = Path(folder) / TABLE
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"folder={folder} holds no {TABLE} ({error.strerror}): choose that of an ended sweep"
        raise SettingError(why) from error
    return pd.DataFrame(rows).apply(_typed)


def _carried_out(command: list[str], output: IO[str]) -> str:
    """Runs it, tells what it tells, returns the last line of that."""
    last = ""
    with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            for line in process.stderr:
                last = line.strip() or last
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(SIGINT)
            raise
    return last


def _has_table(printed: str) -> bool:
    """The last line is for programs."""
    lines = printed.strip().splitlines()
    return bool(lines) and lines[-1].startswith("{") and "sweep_dir" in json.loads(lines[-1])


def _swept(value: object) -> str:
    return ",".join(map(_one, value)) if isinstance(value, list) else _one(value)


def _one(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_one, value))}]"
    return json.dumps(value) if isinstance(value, bool | None) else str(value)


def _typed(column: pd.Series) -> pd.Series:
    """Options came from a command line, as text."""
    if set(column) <= {"True", "False"}:
        return column == "True"
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers if (numbers.notna() == column.notna()).all() else column
