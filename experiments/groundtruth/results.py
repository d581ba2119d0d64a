"""Recorded results: one file for each source and split, one for the fitted unknowns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.groundtruth import calibration, replay
from experiments.groundtruth.calibration import Calibration
from experiments.groundtruth.case import Skipped
from experiments.groundtruth.replay import Row

FOLDER = Path(__file__).parent / "results"
UNKNOWNS = "unknowns.json"


def write(rows: Sequence[Row], skipped: Sequence[Skipped], source: str, split: str, folder: Path = FOLDER) -> None:
    """Replaces what was recorded of this source and split."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"rows": [_rounded(replay.as_json(row)) for row in rows], "skipped": [asdict(one) for one in skipped]}
    provenance.write(folder / f"{source}.{split}.json", provenance.facts() | content)


def read(folder: Path = FOLDER) -> list[Row]:
    """All rows, file by file in order of their names."""
    return [replay.from_json(row) for content in _contents(folder) for row in content["rows"]]


def skipped(folder: Path = FOLDER) -> list[Skipped]:
    """Once, though both splits of a source tell it."""
    told = [Skipped(**one) for content in _contents(folder) for one in content["skipped"]]
    return list(dict.fromkeys(told))


def write_unknowns(fits: Mapping[str, Calibration], folder: Path = FOLDER) -> None:
    """By cost model."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {cost: calibration.as_json(fit) for cost, fit in fits.items()}
    provenance.write(folder / UNKNOWNS, provenance.facts() | {"unknowns": _rounded(content)})


def read_unknowns(folder: Path = FOLDER) -> dict[str, Calibration]:
    """None at all before the first fit."""
    file = folder / UNKNOWNS
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))["unknowns"]
    return {cost: calibration.from_json(fit) for cost, fit in content.items()}


def _contents(folder: Path) -> list[dict[str, Any]]:
    files = sorted(file for file in folder.glob("*.json") if file.name != UNKNOWNS)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _rounded(value: Any) -> Any:
    """To six digits: files that can be read and compared."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
