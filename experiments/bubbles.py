"""`python -m experiments bubbles RUN_DIR`: what pipeline stages waited for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from analysis.bubbles import CAUSES, shares
from analysis.metrics import load
from experiments import report
from experiments.settings import SettingError

COLUMNS = ("busy", *CAUSES)


def show(run_dir: Path) -> None:
    """A table of shares of the makespan, and the bubble ratio by cause."""
    if not (run_dir / "run.json").is_file():
        raise SettingError(f"run_dir={run_dir} is not the folder of a run: it has no run.json")
    causes = load(run_dir).idle_causes
    if len(causes) == 0:
        raise SettingError(f"run_dir={run_dir}: the run has no step")
    makespan = float(causes.loc[0, list(COLUMNS)].sum())
    by_cause = shares(causes)
    idle = float(1 - causes["busy"].mean() / makespan)
    report.console().print(_table(causes, makespan, f"{run_dir}: shares of {makespan:.4g} s"))
    parts = ", ".join(f"{cause} {share:.1%}" for cause, share in by_cause.items())
    print(f"Bubble ratio, while somebody was in the system: {sum(by_cause.values()):.1%} ({parts})")
    print(f"Idle share of the makespan: {idle:.1%}")
    report.for_programs({"run_dir": str(run_dir), "makespan": makespan, "idle": idle} | by_cause)


def _table(causes: pd.DataFrame, makespan: float, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title)
    for name in ("group", "stage", *COLUMNS):
        table.add_column(name, justify="right")
    for row in causes.to_dict("records"):
        table.add_row(str(row["group"]), str(row["stage"]), *(f"{row[name] / makespan:.1%}" for name in COLUMNS))
    return table
