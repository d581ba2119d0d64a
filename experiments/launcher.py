"""How Hydra's sweeps run here: every point in a process of its own, on all cores, to be gone on with after a kill.

`hydra/launcher=basic` runs them one after another in this process, for a debugger.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments import memory, overrides, points, provenance
from experiments.errors import tell
from experiments.points import FINISHED, PROBLEM, Finished, Point
from experiments.progress import Meter, SweepMeter, Tally, sweep_meter
from experiments.settings import SettingError
from experiments.workers import Ended, Event, Line, Pool, Short, Started, Told, cores, method

OUTPUT = "output.txt"
"""What a point printed."""
MOST_LINES = 20
"""Of a point's output that are repeated while the sweep goes on."""
TELL_EVERY = 0.5
LATE = ("pyarrow.dataset", "pyarrow.pandas_compat")
"""Modules that every run imports, but only when it first reads a table."""

Job = Callable[..., object]
"""Takes the configuration, and how its progress is `shown`."""
Batch = Mapping[int, Point]


@dataclass
class ProcessesConf:
    """`workers`: points at a time (null: one a core); `start`: fork or spawn (null: what is safe here)."""

    _target_: str = f"{__name__}.Processes"
    workers: int | None = None
    start: str | None = None


@dataclass
class PointsConf:
    """`params` as for Hydra's basic sweeper: overrides that a configuration brings along."""

    _target_: str = f"{__name__}.Points"
    params: dict[str, str] | None = None


class Points(Sweeper):
    """Every combination. Whether each composes is found where it runs, so that one that does not stops no other."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        # Late: Hydra loads the modules of its plugins anew when it first looks for them.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        self._basic = BasicSweeper(None, params)

    def setup(self, *, hydra_context: HydraContext, task_function: Job, config: DictConfig) -> None:
        self._basic.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)

    def sweep(self, arguments: list[str]) -> Any:
        if not isinstance(self._basic.launcher, Processes):
            return self._basic.sweep(arguments)
        given = self._parser.parse_overrides([*self._basic._parse_config(), *arguments])
        (batch,) = self._basic.split_arguments(given, None)
        return self._basic.launcher.launch(batch, 0)


class Processes(Launcher):
    """Skips what is finished, runs the others side by side, tells how far it is."""

    def __init__(self, workers: int | None = None, start: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise SettingError(f"hydra.launcher.workers={workers} must be at least 1 (null: one a core)")
        if start not in (None, "fork", "spawn"):
            raise SettingError(f"hydra.launcher.start={start} must be fork or spawn (null: what is safe here)")
        self._workers = workers or cores()
        self._start = start or method()

    def setup(self, *, hydra_context: HydraContext, task_function: Job, config: DictConfig) -> None:
        self._runner = Runner(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Point], initial_job_idx: int) -> Sequence[JobReturn]:
        """Outcomes are in the folders: nothing is returned, so that a sweep of any length needs no memory here."""
        setup_globals()
        batch = {initial_job_idx + i: list(point) for i, point in enumerate(job_overrides)}
        folder = self._runner.folder
        command = [_as_given(argument) for argument in sys.argv[1:]]
        with points.claim(folder, list(batch.values()), command):
            done = {number: point for number, point in points.finished(folder).items() if number in batch}
            self._check(batch, done)
            OmegaConf.save(self._runner.config, folder / "multirun.yaml")
            self._run(batch, done)
        return []

    def _check(self, batch: Batch, done: Mapping[int, Finished]) -> None:
        """What is finished must be what would run now: else one folder would hold two experiments."""
        others = len({str(point.revision) for point in done.values()} - {str(provenance.revision())})
        if others:
            print("note: some points were finished with another revision of the code (see run.json)", file=sys.stderr)
        pool = Pool(partial(_tell_digest, self._runner, batch), self._workers, self._start)
        with closing(pool.run(done)) as events:
            for event in events:
                if isinstance(event, Told) and event.word != done[event.number].config:
                    raise SettingError(
                        f"run_dir={self._runner.folder}: point {event.number} was finished with other settings than it "
                        "would have now (a configuration or a default has changed): choose another folder"
                    )

    def _run(self, batch: Batch, done: Mapping[int, Finished]) -> None:
        left = [number for number in batch if number not in done]
        names = dict(zip(batch, map(points.title, points.labels(list(batch.values()))), strict=True))
        tally = Tally(names, over=len(done))
        _announce(self._runner.folder, tally, min(self._workers, len(left)))
        if self._start == "fork":
            _warm(self._runner.config)
        pool = Pool(partial(_run_point, self._runner, batch), self._workers, self._start, memory.Measured())
        try:
            with sweep_meter() as meter, closing(pool.run(left)) as events:
                Following(self._runner.folder, batch, tally, meter).follow(events)
        except KeyboardInterrupt as interrupt:
            done_by_now = len(points.finished(self._runner.folder))
            interrupt.args = (f"{done_by_now} of {len(batch)} points are done; {_how_to_go_on(self._runner.folder)}",)
            raise


def for_sweep(arguments: Sequence[str]) -> list[str]:
    """A sweep's arguments as Hydra must get them: `run_dir=FOLDER` is the folder of all points, and what belongs to a
    part is held back until a point has chosen that part."""
    if not {"-m", "--multirun"} & set(arguments) or {"--cfg", "-c"} & set(arguments):
        return list(arguments)
    return [re.sub(r"^run_dir=(?=[^$,]+$)", "hydra.sweep.dir=", _held_back(argument)) for argument in arguments]


def _held_back(argument: str) -> str:
    """As a sweep over one value: others Hydra applies first to the default parts, which may not have the option."""
    key, _, value = overrides.quoted([argument])[0].partition("=")
    if not value or not re.match(r"\+{0,2}(?!hydra\b)\w+[./]", key):
        return argument
    parser, held = OverridesParser.create(), f"{key}=choice({value})"
    try:
        already = parser.parse_override(f"{key}={value}").is_sweep_override()
        parser.parse_override(held)
    except HydraException:
        return argument
    return argument if already else held


def _as_given(argument: str) -> str:
    return re.sub(r"=choice\(([^,]*)\)$", r"=\1", argument)


def register() -> None:
    """Let `hydra/launcher=processes` and `hydra/sweeper=points` name them."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="processes", node=ProcessesConf, provider="playground")
    store.store(group="hydra/sweeper", name="points", node=PointsConf, provider="playground")
    plugins = Plugins.instance()
    plugins.register(Points)
    plugins.register(Processes)
    plugins.is_in_toplevel_plugins_module = _is_plugin  # type: ignore[method-assign, assignment]


def _is_plugin(name: str) -> bool:
    """Hydra would only take them from the namespace package `hydra_plugins`, which editable installs cannot share."""
    return name.startswith(f"{__name__}.") or Plugins.is_in_toplevel_plugins_module(name)


@dataclass(frozen=True, slots=True)
class Runner:
    """What every process needs to make a point from its overrides."""

    context: HydraContext
    job: Job
    config: DictConfig

    @property
    def folder(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir))

    def compose(self, number: int, point: Point) -> DictConfig:
        load = partial(self.context.config_loader.load_sweep_config, self.config)
        config = overrides.completing(load, list(point))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return config


def _tell_digest(runner: Runner, batch: Batch, number: int, line: Line) -> None:
    """None where it does not even compose."""
    _prepare()
    try:
        line.tell(_digest(runner.compose(number, batch[number])))
    except Exception:  # noqa: BLE001
        line.tell(None)


def _run_point(runner: Runner, batch: Batch, number: int, line: Line) -> None:
    """In a process of its own: from overrides to a finished folder, or to one that says why not."""
    _prepare()
    try:
        config = runner.compose(number, batch[number])
        folder = _folder_of(config)
    except Exception as error:  # noqa: BLE001
        points.fail(runner.folder / str(number), batch[number], str(tell(error)))
        return
    line.tell(str(folder))
    points.clear(folder, runner.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _kept(folder / OUTPUT):
        if _measures(config):
            line.alone()
        else:
            # Threads of several processes that spin for one another's cores make each many times slower.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        job = partial(runner.job, shown=partial(_reporting, line))
        run_job(job, config, "hydra.sweep.dir", "hydra.sweep.subdir", runner.context)
    if not (folder / PROBLEM).exists():
        points.finish(folder, number, _digest(config))


def _warm(config: DictConfig) -> None:
    """Import what points will need, once, before they are forked. What cannot be is told where it is needed."""
    for target in _targets(OmegaConf.to_container(config, resolve=False)):
        with suppress(Exception):
            get_object(target)
    for module in LATE:
        import_module(module)


def _targets(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, child in node.items():
            if key == "_target_":
                yield child
            elif key != "hydra":
                yield from _targets(child)


def _prepare() -> None:
    """What a process that was not forked lacks: resolvers, and the configurations of the front door."""
    setup_globals()
    overrides.register()


def _folder_of(config: DictConfig) -> Path:
    HydraConfig.instance().set_config(config)
    return Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)


def _digest(config: DictConfig) -> str:
    """Of everything but Hydra's own part, which knows folders and times."""
    return points.digest(
        OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    )


def _measures(config: DictConfig) -> bool:
    """Whether its times are the wall's: side by side with others they would be worth nothing."""
    try:
        return bool(getattr(get_object(config.backend._target_), "real_time", False))
    except Exception:  # noqa: BLE001
        return False  # building it will say why


@contextmanager
def _kept(file: Path) -> Iterator[None]:
    """All that is printed meanwhile, by whomever, goes to the file; there is none if nothing was."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with file.open("w", encoding="utf-8", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            with redirect_stdout(output), redirect_stderr(output):
                yield
        finally:
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
            os.close(before[0])
            os.close(before[1])
    if file.stat().st_size == 0:
        file.unlink()


@contextmanager
def _reporting(line: Line, title: str) -> Iterator[Meter]:
    yield Reporter(line)


class Reporter:
    """A run's meter that tells the sweep, now and then, which share of its requests has ended."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._due = monotonic() + TELL_EVERY

    def update(self, done: int, total: int | None, now: float) -> None:
        if not total or (clock := monotonic()) < self._due:
            return
        self._due = clock + TELL_EVERY
        self._line.tell(done / total)


def _announce(folder: Path, tally: Tally, workers: int) -> None:
    print(f"{tally.total} points, {workers} at a time: {folder}", flush=True)
    if tally.over:
        print(f"{tally.over} of them {'is' if tally.over == 1 else 'are'} finished already", flush=True)


def _short(event: Short) -> str:
    takes = f"{event.need / memory.MIB:,.0f} MiB"
    return f"sweep: memory holds {event.running} at a time for now: a point takes up to {takes}; the next one waits"


def _how_to_go_on(folder: Path) -> str:
    return f"to go on: python -m experiments resume {folder}"


class Following:
    """Turns what happens to processes into what people see."""

    def __init__(self, sweep: Path, batch: Batch, tally: Tally, meter: SweepMeter) -> None:
        self._batch = batch
        self._tally = tally
        self._meter = meter
        self._folders = {number: sweep / str(number) for number in batch}

    def follow(self, events: Iterator[Event]) -> None:
        for event in events:
            if isinstance(event, Started):
                self._tally.start(event.number)
            elif isinstance(event, Told):
                self._hear(event)
            elif isinstance(event, Ended):
                self._conclude(event)
            elif isinstance(event, Short):
                self._meter.say(_short(event))
            self._meter.show(self._tally)

    def _hear(self, told: Told) -> None:
        """Its folder, once; then which share is done."""
        if isinstance(told.word, str):
            self._folders[told.number] = Path(told.word)
        else:
            self._tally.share(told.number, told.word)

    def _conclude(self, event: Ended) -> None:
        folder = self._folders[event.number]
        if event.died:
            points.fail(folder, self._batch[event.number], event.died)
        for line in _printed(folder / OUTPUT):
            self._meter.say(f"{self._tally.titles[event.number]}: {line}")
        self._tally.end(event.number, None if (folder / FINISHED).exists() else points.problem(folder))


def _printed(file: Path) -> list[str]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", errors="replace") as output:
        lines = [line.rstrip() for line in islice(output, MOST_LINES + 1)]
    return lines if len(lines) <= MOST_LINES else [*lines[:MOST_LINES], f"... and more in {file}"]
