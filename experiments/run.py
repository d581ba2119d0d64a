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
from traceback import extract_tb
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from analysis.metrics import Summary, load, summarize
from experiments import overrides, plugins, provenance, report, settings
from experiments.build import Parts, Study, build, make
from experiments.errors import explain
from experiments.logger import Finished, Logger
from experiments.progress import Watched, meter
from experiments.settings import SettingError, Settings
from playground.loop import serve
from playground.trace import Trace

SHOW_ALL = os.environ.get("HYDRA_FULL_ERROR") == "1"
PROBLEM = "error.txt"
"""In the folder of a run that could not be: why, in one line."""


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
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"run_dir={run_dir}: {error.strerror}; choose a folder that you may write to") from error
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
    description = provenance.facts() | {
        "backend": type(parts.backend).__name__,
        "policy": type(parts.scheduler.policy).__name__,
        "device": parts.device,
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
        raise SettingError(f"plots=true needs matplotlib: pip install -e '.[report]' ({error})") from error


def job(config: DictConfig) -> Summary | None:
    """What Hydra calls: once, or once for each job of a sweep."""
    context = HydraConfig.get()
    overrides.retarget(config, list(context.overrides.task))
    if context.mode == RunMode.MULTIRUN:
        return _sweep_job(config, context)
    if config.study is not None:
        study = make("study", _container(config)["study"], Study)
        print(json.dumps(study.run(Path(config.run_dir), list(context.overrides.task))))
        return None
    choices = context.runtime.choices
    name = f"{choices['policy']} ({choices['backend']})"
    summary = execute(config, name)
    report.console().print(report.one_run(summary, name))
    if summary["notes"]:
        print(f"Small samples: {'; '.join(summary['notes'])}")
    print(f"Traces and summary: {config.run_dir}")
    print(json.dumps({"run_dir": config.run_dir} | summary))
    return summary


def _sweep_job(config: DictConfig, context: HydraConf) -> Summary | None:
    """A job that cannot run must not take the others with it: the table at the end will tell."""
    try:
        return execute(config, context.job.override_dirname)
    except Exception as error:
        if explain(error) is None:
            raise
        _note_problem(config, error)
        return None


def _note_problem(config: DictConfig, error: Exception) -> None:
    """A folder without results should say why."""
    if (folder := Path(config.run_dir)).is_dir():
        (folder / PROBLEM).write_text(f"{explain(error) or repr(error)}\n", encoding="utf-8")


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _app(config: DictConfig) -> None:
    try:
        job(config)
    except Exception as error:  # noqa: BLE001
        # Told here and not in main: on its way there Hydra would add lines of its own.
        _note_problem(config, error)
        _give_up(error)


def main() -> None:
    """Exit codes: 0 served, 2 something to mend in the options, 130 interrupted, 1 a bug (with its traceback)."""
    settings.register()
    plugins.register()
    # The console script, unlike `python -m`, would not find a user's module in the folder that it is called from.
    sys.path.append(os.getcwd())
    try:
        overrides.check_flags(sys.argv[1:])
        overrides.completing(_compose_and_run, sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted: what was traced until then is in the run folder", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # noqa: BLE001
        _give_up(error)


def _compose_and_run(arguments: list[str]) -> None:
    # Hydra would print and exit by itself; told so, it lets errors through to be explained here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = arguments
    _app()


def _give_up(error: Exception) -> NoReturn:
    """One line for what the user can mend; a traceback for a bug, or for whoever asks for it."""
    line = None if SHOW_ALL else explain(error) or _before_our_time(error)
    if line is None:
        raise error
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def _before_our_time(error: Exception) -> str | None:
    """An error of Hydra's, before any of our code ran, is about what the user asked it for."""
    if any(frame.name == _app.__name__ for frame in extract_tb(error.__traceback__)):
        return None
    if isinstance(error, OSError):
        return f"hydra.run.dir={error.filename}: {error.strerror}; choose a folder that you may write to"
    text = " ".join(str(error).split())
    empty = [argument for argument in sys.argv[1:] if argument.endswith("=null")]
    if "Config group override must be" in text and empty:
        return f"{empty[0]}: a group takes the name of one of its options; `playground --help` lists them"
    return text
