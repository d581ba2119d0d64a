"""The front door: composes a run from its configuration, serves it, and leaves a run folder.

Wiring only: what a part does is told in its own module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, is_dataclass
from math import isfinite
from pathlib import Path
from signal import SIGTERM, signal
from time import perf_counter, process_time
from traceback import extract_tb
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from analysis.metrics import Summary, load, summarize
from experiments import launcher, overrides, plugins, provenance, report, settings, torchrun
from experiments.build import Parts, Study, build, make
from experiments.errors import BUG, MEND, Told, tell
from experiments.logger import Finished, Logger
from experiments.points import PROBLEM
from experiments.progress import Meter, Shown, Watched, meter
from experiments.settings import SettingError, Settings
from experiments.workers import Terminated
from playground.loop import serve
from playground.trace import SCHEMAS, Trace, read

FULL_ERROR = "HYDRA_FULL_ERROR"
SHOW_ALL = os.environ.get(FULL_ERROR) == "1"
TRACES = ("run.json", *(f"{table}.{kind}" for table in SCHEMAS for kind in ("parquet", "arrows")))
"""What only a run leaves."""


def execute(config: DictConfig, title: str = "", shown: Shown = meter) -> Summary:
    """One run, from its configuration to its folder; the summary."""
    wanted = settings.read(config)
    torchrun.check(wanted, os.environ)
    run_dir = _run_dir(wanted)
    parts = build(wanted)
    try:
        _claim(run_dir)
        describe(run_dir, config, parts)
        _tell_cap(wanted, parts)
        _serve(run_dir, parts, shown(title or run_dir.name))
    finally:
        parts.backend.close()
    return _conclude(run_dir, config, wanted, parts)


def _run_dir(wanted: Settings) -> Path:
    """Refused before weights are loaded, if it holds a run."""
    if not wanted.run_dir.strip():
        raise SettingError("run_dir= is empty: give run_dir=FOLDER, or leave it out")
    folder = Path(wanted.run_dir).expanduser()
    if any(next(folder.glob(pattern), None) for pattern in TRACES):
        raise _taken(folder)
    return folder


def _taken(folder: Path) -> SettingError:
    return SettingError(f"run_dir={folder} already holds a run: choose another folder, or delete that one")


def _claim(folder: Path) -> None:
    """Of two runs that begin at once only one gets the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").touch(exist_ok=False)
    except FileExistsError as error:
        raise _taken(folder) if folder.is_dir() else _unwritable(folder, error) from error
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> SettingError:
    return SettingError(f"run_dir={folder}: {error.strerror}; choose a folder that you may write to")


def describe(run_dir: Path, config: DictConfig, parts: Parts) -> None:
    """What the run is, written before it begins: a killed run is still readable."""
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
    description = provenance.facts() | {
        "backend": type(parts.backend).__name__,
        "policy": _finite(_container(config)["policy"]),
        "device": parts.device,
        "model": OmegaConf.select(config, "model.path"),
        "seed": config.seed,
        "spec": asdict(parts.backend.spec),
    }
    provenance.write(run_dir / "run.json", description)


def _finite(value: Any) -> Any:
    """JSON has no infinity: written as text."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _tell_cap(wanted: Settings, parts: Parts) -> None:
    fitting, blocks = parts.backend.spec.blocks, wanted.kv.blocks
    if blocks is not None and blocks > fitting:
        print(f"note: kv.blocks={blocks} is more than fits: the pool has {fitting} blocks", file=sys.stderr)


def _serve(run_dir: Path, parts: Parts, shown: AbstractContextManager[Meter]) -> None:
    wall, cpu = perf_counter(), process_time()
    ended = "failed"
    try:
        with Trace(run_dir) as trace, shown as watcher:
            serve(Watched(parts.source, watcher), parts.scheduler, parts.backend, trace)
        ended = "completed"
    except KeyboardInterrupt:
        ended = "interrupted"
        _summarize_interrupted(run_dir, parts)
        raise
    except Exception as error:
        if foreign := _foreign(parts.scheduler.policy):
            error.add_note(f"with a policy of your own, {foreign}: what did it answer?")
        raise
    finally:
        spent = {"wall": perf_counter() - wall, "cpu": process_time() - cpu}
        amend(run_dir, {"spent": spent, "ended": ended})


def amend(run_dir: Path, more: Mapping[str, Any]) -> None:
    """What is known of a run only later."""
    file = run_dir / "run.json"
    provenance.write(file, json.loads(file.read_text(encoding="utf-8")) | dict(more))


def _summarize_interrupted(run_dir: Path, parts: Parts) -> None:
    """Of those that ended; says how many had not."""
    tables = load(run_dir)
    summary = summarize(tables, parts.objectives)
    arrived, ended = read(run_dir, "arrivals").num_rows, len(tables.requests)
    summary["notes"] = [f"interrupted: {arrived - ended:,} of {arrived:,} requests had not ended", *summary["notes"]]
    provenance.write(run_dir / "summary.json", summary)


def _foreign(policy: object) -> str | None:
    """The policy's class, or that of a choice of it, that is not of this repository."""
    parts = [policy, *(_choices(policy) if is_dataclass(policy) else ())]
    named = [f"{type(part).__module__}.{type(part).__qualname__}" for part in parts]
    return next((name for name in named if not name.startswith("policies.")), None)


def _choices(part: Any) -> list[object]:
    return [getattr(part, field.name) for field in fields(part)]


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
            advice = ": raise kv.blocks, or shorten the workload's prompts and max_tokens" if "KV blocks" in why else ""
            raise SettingError(f"{line}{advice}")
        print(f"note: {line}", file=sys.stderr)


def _plot(tables: Mapping[str, Any], folder: Path) -> None:
    try:
        from analysis.plots import save_all

        save_all(tables, folder)
    except ImportError as error:
        raise SettingError(f"plots=true needs matplotlib: pip install -e '.[report]' ({error})") from error


def job(config: DictConfig, shown: Shown = meter) -> Summary | None:
    """What Hydra calls: once, or once for each job of a sweep."""
    context = HydraConfig.get()
    given = overrides.as_given(context.overrides.task)
    overrides.retarget(config, given)
    if context.mode == RunMode.MULTIRUN:
        torchrun.check_single("-m", os.environ)
        return _sweep_job(config, context, shown)
    if config.study is not None:
        torchrun.check_single("study", os.environ)
        study = make("study", _container(config)["study"], Study)
        report.for_programs(study.run(Path(config.run_dir), given))
        return None
    choices = context.runtime.choices
    name = f"{overrides.policy_name(choices['policy'], given)} ({choices['backend']})"
    summary = execute(config, name)
    report.console().print(report.one_run(summary, name))
    if summary["notes"]:
        print(f"Small samples: {'; '.join(summary['notes'])}")
    print(f"Traces and summary: {config.run_dir}")
    report.for_programs({"run_dir": config.run_dir} | summary)
    return summary


def _sweep_job(config: DictConfig, context: HydraConf, shown: Shown) -> Summary | None:
    """A job that cannot run must not take the others with it: the table at the end will tell."""
    try:
        return execute(config, _job_title(context), shown)
    except Exception as error:  # noqa: BLE001
        _note_problem(context, error)
        return None


def _job_title(context: HydraConf) -> str:
    """What differs between the jobs: `tokens=256`."""
    keys, given = overrides.swept(sys.argv[1:]), overrides.as_given(context.overrides.task)
    values = {key.lstrip("+"): value for key, _, value in (task.partition("=") for task in given)}
    return " ".join(f"{key.rpartition('.')[2]}={values[key]}" for key in keys if key in values) or context.job.name


def _note_problem(context: HydraConf, error: Exception) -> None:
    """A folder without results should say why: Hydra's, since `run_dir` may be another run's."""
    if (folder := Path(context.runtime.output_dir)).is_dir():
        (folder / PROBLEM).write_text(f"{tell(error)}\n", encoding="utf-8")


def front(config: DictConfig, shown: Shown = meter) -> None:
    """The job as a sweep's processes find it: by its name."""
    try:
        job(config, shown)
    except Exception as error:  # noqa: BLE001
        # Told here and not in main: on its way there Hydra would add lines of its own.
        _note_problem(HydraConfig.get(), error)
        _give_up(error)


_app = hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(front)


def main() -> None:
    """0 served, 2 something to mend in the options, 130 or 143 interrupted, 1 a bug (with its traceback).

    Under `torchrun` that is rank 0's code; another rank's process works for it, and ends with it.
    """
    settings.register()
    plugins.register()
    overrides.register()
    launcher.register()
    _work()
    before = signal(SIGTERM, torchrun.patient(_terminate, os.environ))
    # The console script, unlike `python -m`, would not find a user's module in the folder that it is called from.
    sys.path.append(os.getcwd())
    try:
        overrides.completing(_compose_and_run, launcher.for_sweep(overrides.in_order(sys.argv[1:])))
    except KeyboardInterrupt as interrupt:
        told = interrupt.args[0] if interrupt.args else "what was traced until then is in the run folder"
        print(f"interrupted: {told}", file=sys.stderr)
        sys.exit(143 if isinstance(interrupt, Terminated) else 130)
    except Exception as error:  # noqa: BLE001
        _give_up(error)
    finally:
        signal(SIGTERM, before)


def _work() -> None:
    """Who is not the driver must be gone before anything is made: folders, names at W&B, output."""
    try:
        code = torchrun.work(os.environ)
    except Exception as error:  # noqa: BLE001
        _give_up(error)
    if code is not None:
        sys.stderr.flush()
        os._exit(code)  # threads may be in the middle of an exchange that a lost rank has left


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _compose_and_run(arguments: list[str]) -> None:
    # Hydra would print and exit by itself; told so, it lets errors through to be explained here.
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    sys.argv[1:] = arguments
    try:
        _app()
    finally:  # whoever is started by this process later has said nothing of the kind
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _give_up(error: Exception) -> NoReturn:
    """A line for what the user can mend, and their own frames; a traceback for a bug, or for whoever asks for it."""
    if SHOW_ALL:
        raise error
    told = tell(error)
    if told.code == BUG and (line := _before_our_time(error)):
        told = Told(line, "", MEND)
    if told.details.startswith("Traceback"):
        raise error
    print(f"error: {told}", file=sys.stderr)
    sys.exit(told.code)


def _before_our_time(error: Exception) -> str | None:
    """An error of Hydra's, before any of our code ran, is about what the user asked it for."""
    if any(frame.name == front.__name__ for frame in extract_tb(error.__traceback__)):
        return None
    if isinstance(error, OSError):
        return f"hydra.run.dir={error.filename}: {error.strerror}; choose a folder that you may write to"
    text = " ".join(str(error).split())
    empty = [argument for argument in sys.argv[1:] if argument.endswith("=null")]
    if "Config group override must be" in text and empty:
        return f"{empty[0]}: a group takes the name of one of its options; `playground --help` lists them"
    return text
