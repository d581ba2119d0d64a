"""The front door: composes a run from its configuration, serves it, and leaves a run folder.

Wiring only: what a part does is told in its own module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from analysis.metrics import Summary, load, summarize
from experiments import plugins, provenance, report, settings
from experiments.build import Parts, build, setting
from experiments.errors import explain
from experiments.logger import Finished, Logger
from experiments.progress import Watched, meter
from experiments.retarget import retarget
from experiments.settings import SettingError, Settings
from playground.loop import serve
from playground.trace import Trace

PROBLEM = "error.txt"
"""In the folder of a sweep's job that could not run: why, in one line."""


def execute(config: DictConfig, title: str = "") -> Summary:
    """One run, from its configuration to its folder; the summary."""
    wanted = settings.read(config)
    run_dir = Path(wanted.run_dir)
    parts = build(wanted)
    try:
        _describe(run_dir, config, parts)
        _serve(run_dir, parts, title or run_dir.name)
    finally:
        parts.backend.close()
    return _conclude(run_dir, config, wanted, parts)


def _describe(run_dir: Path, config: DictConfig, parts: Parts) -> None:
    """What the run is, written before it begins: a killed run is still readable."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
    description = provenance.facts() | {
        "backend": type(parts.backend).__name__,
        "policy": type(parts.scheduler.policy).__name__,
        "device": OmegaConf.select(config, "device.name"),
        "model": OmegaConf.select(config, "model.path"),
        "seed": config.seed,
        "spec": asdict(parts.backend.spec),
    }
    provenance.write(run_dir / "run.json", description)


def _serve(run_dir: Path, parts: Parts, title: str) -> None:
    wall, cpu = perf_counter(), process_time()
    with Trace(run_dir) as trace, meter(title) as shown:
        serve(Watched(parts.source, shown), parts.scheduler, parts.backend, trace)
    file = run_dir / "run.json"
    spent = {"wall": perf_counter() - wall, "cpu": process_time() - cpu}
    provenance.write(file, json.loads(file.read_text()) | {"spent": spent})


def _conclude(run_dir: Path, config: DictConfig, wanted: Settings, parts: Parts) -> Summary:
    tables = load(run_dir)
    summary = summarize(tables, parts.objectives)
    _check_served(summary, tables.requests)
    provenance.write(run_dir / "summary.json", summary)
    if wanted.plots:
        _plot({run_dir.name: tables}, run_dir / "plots")
    _publish(Finished(run_dir, _container(config), summary), parts.logger)
    return summary


def _publish(run: Finished, logger: Logger) -> None:
    began = perf_counter()
    if told := logger.publish(run):
        print(f"{told}  (logging took {perf_counter() - began:.1f} s)", file=sys.stderr)


def _container(config: DictConfig) -> dict[str, Any]:
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _check_served(summary: Summary, requests: Any) -> None:
    """A run in which nothing could be served is a wrong setting, not a result."""
    if summary["requests"] == 0:
        raise SettingError("workload: it has no request; choose another or raise its number or duration")
    if summary["rejected"]:
        why = requests.loc[requests["outcome"] == "rejected", "why"].iloc[0]
        line = f"{summary['rejected']:,} of {summary['requests']:,} requests were rejected, the first since {why}"
        if summary["rejected"] == summary["requests"]:
            raise SettingError(f"{line}: raise kv.blocks, or shorten the workload's prompts and max_tokens")
        print(f"note: {line}", file=sys.stderr)


def _plot(tables: Mapping[str, Any], folder: Path) -> None:
    try:
        from analysis.plots import save_all

        save_all(tables, folder)
    except ImportError as error:
        raise SettingError(
            f"plots=true needs matplotlib: pip install 'serving-playground[report]' ({error})"
        ) from error


def job(config: DictConfig) -> Summary | None:
    """What Hydra calls: once, or once for each job of a sweep."""
    context = HydraConfig.get()
    retarget(config, list(context.overrides.task))
    if context.mode == RunMode.MULTIRUN:
        return _sweep_job(config, context)
    if config.study is not None:
        with setting("study"):
            study = instantiate(config.study, _convert_="all")
        study.run(Path(config.run_dir), list(context.overrides.task))
        return None
    choices = context.runtime.choices
    summary = execute(config, f"{choices.policy} ({choices.backend})")
    report.console().print(report.one_run(summary))
    print(f"Traces and summary: {config.run_dir}")
    print(json.dumps({"run_dir": config.run_dir} | summary))
    return summary


def _sweep_job(config: DictConfig, context: HydraConf) -> Summary | None:
    """A job that cannot run must not take the others with it: the table at the end will tell."""
    try:
        return execute(config, context.job.override_dirname)
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        (Path(config.run_dir) / PROBLEM).write_text(line + "\n", encoding="utf-8")
        print(f"error: {line}", file=sys.stderr)
        return None


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _app(config: DictConfig) -> None:
    job(config)


def main() -> None:
    """Exit codes: 0 served, 2 something to mend in the options, 130 interrupted, 1 a bug (with its traceback)."""
    settings.register()
    plugins.register()
    show_all = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra would print and exit by itself; told so, it lets errors through to be explained here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        _app()
    except KeyboardInterrupt:
        print("interrupted: what was traced until then is in the run folder", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        line = None if show_all else explain(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
