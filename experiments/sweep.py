"""After a multirun: one table over all jobs, also saved as sweep.csv and sweep.json in the sweep's folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from experiments import report
from experiments.errors import BUG, MEND

Row = dict[str, Any]


class Comparison(Callback):
    """Reads folders, not memory: jobs may have run in other processes or on other machines."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = sorted((path for path in folder.iterdir() if (path / ".hydra").is_dir()), key=_number)
        told, failed = _gather(jobs)
        _save(folder, told, failed)
        if told:
            report.console().print(report.comparison(told))
        for labels, problem in failed:
            line, *frames = problem.splitlines()
            print(f"failed: {_name(labels)}: {line}{' (see its error.txt)' if frames else ''}", file=sys.stderr)
        print(f"Jobs, sweep.csv and sweep.json: {folder}", flush=True)
        report.for_programs({"sweep_dir": str(folder), "jobs": len(told), "failed": len(failed)})
        if failed:
            # Only a bug, ours or the user's, comes with frames.
            sys.exit(BUG if any("\n" in problem for _, problem in failed) else MEND)


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdigit() else (1 << 30, path.name)


def _gather(jobs: list[Path]) -> tuple[list[tuple[Row, Row]], list[tuple[Row, str]]]:
    """(labels, summary) of the jobs that ran, (labels, problem) of the others."""
    names = {path: _overrides(path) for path in jobs}
    # What all jobs share distinguishes none.
    varied = {key for labels in names.values() for key in labels if len({n.get(key) for n in names.values()}) > 1}
    labels = {path: {key: value for key, value in names[path].items() if key in varied} for path in jobs}
    ran = [path for path in jobs if (path / "summary.json").exists()]
    told = [(labels[path], json.loads((path / "summary.json").read_text())) for path in ran]
    return told, [(labels[path], _problem(path)) for path in jobs if path not in ran]


def _overrides(job: Path) -> Row:
    listed = OmegaConf.load(job / ".hydra" / "overrides.yaml")
    return dict(str(override).lstrip("+~").partition("=")[::2] for override in listed)


def _problem(job: Path) -> str:
    file = job / "error.txt"
    return file.read_text(encoding="utf-8").strip() if file.exists() else f"no summary in {job}"


def _name(labels: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in labels.items()) or "job"


def _save(folder: Path, told: list[tuple[Row, Row]], failed: list[tuple[Row, str]]) -> None:
    rows = [labels | {k: v for k, v in summary.items() if not isinstance(v, list)} for labels, summary in told]
    rows += [labels | {"error": why.partition("\n")[0]} for labels, why in failed]
    (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    pd.DataFrame(rows).to_csv(folder / "sweep.csv", index=False)
