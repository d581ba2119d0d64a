"""After a multirun: one table over all jobs, also saved as sweep.csv and sweep.json in the sweep's folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from experiments import points, report
from experiments.errors import BUG, MEND
from experiments.points import PROBLEM

Row = dict[str, Any]
MOST_NAMES = 4
"""Of the jobs that failed for the same reason."""


class Comparison(Callback):
    """Reads folders, not memory: jobs may have run in other processes or on other machines."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        told, failed = _gather(sorted((path for path in folder.iterdir() if (path / ".hydra").is_dir()), key=_number))
        _save(folder, told, failed)
        if told:
            report.console().print(report.comparison([(labels, summary) for labels, summary, _ in told]))
        for line in _problems(failed):
            print(f"failed: {line}", file=sys.stderr)
        print(f"Jobs, sweep.csv and sweep.json: {folder}", flush=True)
        report.for_programs({"sweep_dir": str(folder), "jobs": len(told), "failed": len(failed)})
        if failed:
            # Only a bug, ours or the user's, comes with frames.
            sys.exit(BUG if any("\n" in problem for _, problem, _ in failed) else MEND)


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdigit() else (1 << 30, path.name)


def _gather(jobs: list[Path]) -> tuple[list[tuple[Row, Row, Path]], list[tuple[Row, str, Path]]]:
    """(labels, summary, folder) of the jobs that ran, (labels, problem, folder) of the others."""
    labels = dict(zip(jobs, points.labels([_overrides(job) for job in jobs]), strict=True))
    failed = [job for job in jobs if (job / PROBLEM).exists() or not (job / "summary.json").exists()]
    told = [(labels[job], json.loads((job / "summary.json").read_text()), job) for job in jobs if job not in failed]
    return told, [(labels[job], _problem(job), job) for job in failed]


def _overrides(job: Path) -> list[str]:
    return [str(override) for override in OmegaConf.load(job / ".hydra" / "overrides.yaml")]


def _problem(job: Path) -> str:
    file = job / PROBLEM
    return file.read_text(encoding="utf-8").strip() if file.exists() else f"no summary in {job}"


def _problems(failed: list[tuple[Row, str, Path]]) -> list[str]:
    """One line for each reason, with the jobs that it stopped."""
    stopped: dict[str, list[str]] = {}
    for labels, problem, job in failed:
        line, *frames = problem.splitlines()
        reason = f"{line} (see {job.name}/{PROBLEM})" if frames else line
        stopped.setdefault(reason, []).append(points.name(labels))
    return [f"{_some(names)}: {reason}" for reason, names in stopped.items()]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return "; ".join(names[:MOST_NAMES]) + more


def _save(folder: Path, told: list[tuple[Row, Row, Path]], failed: list[tuple[Row, str, Path]]) -> None:
    rows = [
        {"job": job.name} | labels | {k: v for k, v in summary.items() if not isinstance(v, list)}
        for labels, summary, job in told
    ]
    rows += [{"job": job.name} | labels | {"error": why.partition("\n")[0]} for labels, why, job in failed]
    (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    pd.DataFrame(rows).to_csv(folder / "sweep.csv", index=False)
