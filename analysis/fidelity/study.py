"""A study's folder, read: pairs of one hardware run and its simulated twin each (`python -m experiments fidelity`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.metrics import Tables, latencies, load

VERSION = 1
Setting = tuple[str, str, str]
"""(workload, load, pool)"""


@dataclass(frozen=True)
class Pair:
    """One hardware run and its twin. Columns of `predicted`: docs/fidelity.md."""

    folder: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def group(self) -> str:
        """Its repetitions share it."""
        return str(self.about["group"])

    @property
    def policy(self) -> str:
        return str(self.about["policy"])

    @property
    def setting(self) -> Setting:
        return str(self.about["workload"]), str(self.about["load"]), str(self.about["pool"])

    @cached_property
    def hardware(self) -> Tables:
        return load(self.folder / "hardware")

    @cached_property
    def simulated(self) -> Tables:
        return load(self.folder / "simulated")

    @cached_property
    def predicted(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "predicted.parquet")

    @cached_property
    def latencies(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Of finished requests on hardware and simulated: ttft, tpot, e2el in seconds."""
        return _finished(self.hardware), _finished(self.simulated)


def _finished(tables: Tables) -> pd.DataFrame:
    return latencies(tables.requests[tables.requests["outcome"] == "finished"])


def read(study: Path) -> list[Pair]:
    """All complete pairs, by name. `ValueError`, in one line, where there are none or one cannot be read."""
    files = sorted((study / "pairs").glob("*/pair.json"))
    if not files:
        raise ValueError(f"{study}: no pairs; make them with: python -m experiments fidelity twin -o {study}")
    return [_pair(file) for file in files]


def _pair(file: Path) -> Pair:
    about = json.loads(file.read_text(encoding="utf-8"))
    if about.get("version") != VERSION:
        raise ValueError(f"{file}: version {about.get('version')}, and this reads {VERSION}: make the pair anew")
    for part in ("hardware", "simulated"):
        if not (file.parent / part / "requests.parquet").is_file():
            raise ValueError(
                f"{file.parent / part}: no run; make the pair anew, or keep the hardware's folder in place"
            )
    return Pair(file.parent, about)


def settings(pairs: Sequence[Pair]) -> dict[Setting, list[Pair]]:
    found: dict[Setting, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.setting, []).append(pair)
    return found
