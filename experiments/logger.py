"""Mirrors of a finished run: W&B, TensorBoard, or none. The run folder stays the source of truth.

Everything is taken from the trace after the run, so a logger can neither slow a run down nor change it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from experiments.settings import SettingError

TRACE_FILES = ("config.yaml", "run.json", "summary.json", "*.parquet")


@dataclass(frozen=True, slots=True)
class Finished:
    """What there is to tell of a run."""

    run_dir: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        return {name: value for name, value in self.summary.items() if isinstance(value, int | float)}

    @property
    def curves(self) -> list[dict[str, float]]:
        """One row a window of time, a thousand at most, so that logging never dominates."""
        from analysis import curves  # brings pandas, half of a run's start-up

        return [{str(k): v for k, v in row.items()} for row in curves.read(self.run_dir).to_dict("records")]

    @property
    def files(self) -> list[Path]:
        return [path for pattern in TRACE_FILES for path in sorted(self.run_dir.glob(pattern))]


class Logger(Protocol):
    def publish(self, run: Finished) -> str | None:
        """Pass a finished run on; where to look at it, as a line for people."""
        ...


@dataclass(frozen=True, slots=True)
class NullLogger:
    """Keeps the run folder and tells nobody."""

    def publish(self, run: Finished) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class WandbLogger:
    """Config, thinned curves, summary and the trace files as an artifact, in W&B's format.

    `mode`: offline (no account; `wandb sync` later), online, or disabled. Everything stays inside the run folder.
    """

    project: str = "serving-playground"
    mode: str = "offline"
    group: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise SettingError(f"logger.mode={self.mode} must be offline, online or disabled")
        _check_installed("wandb", "wandb")

    def publish(self, run: Finished) -> str | None:
        import wandb

        folder = run.run_dir.resolve()
        with _environment(WANDB_DIR=str(folder), WANDB_DATA_DIR=str(folder / "wandb-data"), WANDB_SILENT="true"):
            mirror = wandb.init(
                project=self.project,
                mode=self.mode,  # type: ignore[arg-type]
                group=self.group,
                name=self.name or run.run_dir.name,
                config=dict(run.config),
                dir=str(folder),
                reinit="finish_previous",
            )
            self._fill(mirror, run)
            mirror.finish()
        return None if self.mode == "disabled" else f"W&B ({self.mode}): wandb leet {folder / 'wandb'}"

    def _fill(self, mirror: Any, run: Finished) -> None:
        import wandb

        mirror.define_metric("time")
        mirror.define_metric("*", step_metric="time")
        for row in run.curves:
            mirror.log(row)
        mirror.summary.update(run.numbers)
        artifact = wandb.Artifact(f"trace-{mirror.id}", type="trace")
        for path in run.files:
            artifact.add_file(str(path))
        mirror.log_artifact(artifact)


@dataclass(frozen=True, slots=True)
class TensorBoardLogger:
    """Curves over milliseconds of the run, and the summary, as event files for a local viewer."""

    def __post_init__(self) -> None:
        _check_installed("tensorboard", "report")

    def publish(self, run: Finished) -> str | None:
        from tensorboard.summary import Writer

        folder = run.run_dir / "tensorboard"
        writer = Writer(str(folder))
        for row in run.curves:
            # TensorBoard's axis is a whole number: milliseconds keep windows apart.
            at = round(row.pop("time") * 1e3)
            for name, value in row.items():
                writer.add_scalar(f"curves/{name}", float(value), at)
        for name, value in run.numbers.items():
            writer.add_scalar(f"summary/{name}", float(value), 0)
        writer.close()
        return f"TensorBoard: tensorboard --logdir {folder}"


def _check_installed(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise SettingError(f"logger={package} needs a package that is not installed: pip install -e '.[{extra}]'")


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Variables that hold only inside: one process may write several runs, each into its own folder."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
